#!/bin/bash
# Creates the images that the node runs, and the node's simulated GPU.
#
#   images.sh BUILT DIR
set -eu

built=$1 out=$2
here=$(realpath "$(dirname "$0")")
project=$(realpath "$here/../..")
mkdir -p "$out/gpu"

image() { # name, directory, command
    local file=${1%%:*}
    file=${file##*/}.d
    mkdir -p "$out/$file"
    tar -C "$2" --owner=0 --group=0 -cf "$out/$file/layer.tar" .
    local sum
    sum=$(sha256sum <"$out/$file/layer.tar")
    cat >"$out/$file/config.json" <<CONFIG
{"architecture": "$(dpkg --print-architecture)", "os": "linux", "config": {"Env": ["PATH=/usr/bin"], "Cmd": ["$3"]},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:${sum%% *}"]}}
CONFIG
    echo "[{\"Config\": \"config.json\", \"RepoTags\": [\"$1\"], \"Layers\": [\"layer.tar\"]}]" >"$out/$file/manifest.json"
    tar -C "$out/$file" -cf "$out/${file%.d}.tar" manifest.json config.json layer.tar
    rm -r "${out:?}/$file" "$2"
}

# Adds nvsharectl as built for the image. The node has other libraries, and runs nvsharectl too.
mkdir "$out/built"
cp -s "$built"/nvshare-* "$built/libnvshare.so" "$built/static/nvsharectl" "$out/built"
"$project/kubernetes/image.sh" "$out/built" "$out/nvshare"
rm -r "$out/built"
strip --strip-debug "$out"/nvshare/usr/bin/* "$out"/nvshare/usr/lib/nvshare/libnvshare.so
image nvshare:0.1.0 "$out/nvshare" /usr/bin/nvsharectl

# Builds the program that keeps a pod's namespaces.
mkdir "$out/pause"
echo 'int pause(void); int main(void) { for (;;) pause(); }' | cc -static -x c - -o "$out/pause/pause"
image nvshare.test/pause:1 "$out/pause" /pause

# A CUDA program, without nvshare.
install -D "$built/cuda-program" "$out/program/usr/bin/cuda-program"
mkdir "$out/program/etc" "$out/program/tmp"
"$project/tests/cuda-sim/install.sh" "$out/gpu" "$built"
LD_LIBRARY_PATH=$out/gpu ldd "$built/cuda-program" | grep -o '/[^ ]*' | grep -v "$out/gpu" | sort -u | while read -r library; do
    install -D "$(realpath "$library")" "$out/program$library"
done
# The same program in an image with its own preload list.
cp -r "$out/program" "$out/preloads"
mkdir "$out/preloads/opt"
echo 'int of_the_image;' | cc -shared -fPIC -x c - -o "$out/preloads/opt/libown.so"
echo /opt/libown.so >"$out/preloads/etc/ld.so.preload"
image nvshare.test/program:1 "$out/program" /usr/bin/cuda-program
# An image with a list that cannot be merged.
cp -r "$out/preloads" "$out/links"
ln -sf /etc/list "$out/links/etc/ld.so.preload"
echo /opt/libown.so >"$out/links/etc/list"
image nvshare.test/links:1 "$out/links" /usr/bin/cuda-program
image nvshare.test/preloads:1 "$out/preloads" /usr/bin/cuda-program

# The edits that NVIDIA's runtime makes to containers.
libraries=/usr/lib/$(gcc -dumpmachine)
cat >"$out/gpu/edits.json" <<EDITS
{"mounts": [
  {"type": "bind", "source": "/opt/gpu/libcuda.so.1", "destination": "$libraries/libcuda.so.1", "options": ["bind", "ro"]},
  {"type": "bind", "source": "/opt/gpu/libnvidia-ml.so.1", "destination": "$libraries/libnvidia-ml.so.1", "options": ["bind", "ro"]},
  {"type": "bind", "source": "/run/gpu", "destination": "/run/gpu", "options": ["bind", "rw"]}],
 "env": ["CUDA_SIM_DIR=/run/gpu", "NVSHARE_DEVICES=/run/gpu", "CUDA_SIM_MEMORY=256M", "CUDA_SIM_CONTEXT=4M"]}
EDITS
