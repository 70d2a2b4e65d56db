#!/bin/bash
# Builds the Kubernetes programs of a cluster with one node, from Debian's source package.
#
#   kubernetes.sh DIR   DIR: the target directory
#
# Debian 12 is the last release whose package contains all programs. The package is Kubernetes 1.20.
# This script makes the one-line change of 1.26. Before that change, the kubelet sent the socket's
# path as the HTTP/2 authority, which tonic rightly refuses.
set -eu

suite=bookworm
programs="kubelet kube-apiserver kube-controller-manager kube-scheduler kubectl"

if [ "${1:-}" = inside ]; then # the chroot, with its own mounts
    root=$2
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount -t tmpfs tmpfs "$root/dev"
    for device in null zero full random urandom; do
        touch "$root/dev/$device"
        mount --bind "/dev/$device" "$root/dev/$device"
    done
    exec chroot "$root" /bin/sh -eu /build
fi

[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
out=$1 work=$1.new
rm -rf --one-file-system "$work"
mkdir -p "$work/lists/partial" "$work/root"

echo "--- Kubernetes: a Debian with Go, and the source package"
mmdebstrap --quiet --format=tar --variant=apt --include=golang-go,golang-github-modern-go-reflect2-dev,dpkg-dev \
    $suite - | tar -C "$work/root" --exclude='./dev/*' -xf -
# The site from which this machine gets its packages.
site=$(apt-get indextargets --format '$(SITE)' | head -n 1)
echo "deb-src $site $suite main" >"$work/sources.list"
sources=(-o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists="$work/lists")
apt-get -qq "${sources[@]}" update
mkdir -p "$work/root/go/src/k8s.io"
(cd "$work/root/go/src/k8s.io" && apt-get -qq "${sources[@]}" -o APT::Sandbox::User=root source --download-only kubernetes)

echo "--- Kubernetes: building it"
cat >"$work/root/build" <<BUILD
export GOPATH=/go GO111MODULE=off GOFLAGS= GOCACHE=/go/cache CGO_ENABLED=0
cd /go/src/k8s.io
dpkg-source --no-check -x kubernetes_*.dsc kubernetes >/dev/null
cd kubernetes
sed -i 's/grpc.WithContextDialer(/grpc.WithAuthority("localhost"), &/' pkg/kubelet/cm/devicemanager/endpoint.go

# The package's copy of this library crashes in programs built with Go 1.18 or newer when they
# iterate over a map.
rm vendor/github.com/modern-go/reflect2/*.go vendor/github.com/modern-go/reflect2/*.s
cp /usr/share/gocode/src/github.com/modern-go/reflect2/* vendor/github.com/modern-go/reflect2

# The only generated file that the package lacks.
go build -o /openapi-gen ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
with=\$(cd vendor && find -L k8s.io -name '*.go' -not -path '*/sample-*' -not -path '*/code-generator/*' -not -path '*/_examples/*' \\
    -exec grep -l '+k8s:openapi-gen=' {} + | xargs -n 1 dirname | sort -u | sed 's|^|k8s.io/kubernetes/vendor/|' | paste -s -d ,)
/openapi-gen -i "\$with" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \\
    -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r /dev/null

version=k8s.io/kubernetes/vendor/k8s.io/component-base/version
for program in $programs; do
    go build -o "/\$program" \\
        -ldflags "-s -w -X \$version.gitVersion=v1.20.2 -X \$version.gitMajor=1 -X \$version.gitMinor=20" ./cmd/\$program
done
BUILD
unshare --mount --fork "$0" inside "$work/root"
mkdir "$work/programs"
for program in $programs; do mv "$work/root/$program" "$work/programs"; done
rm -rf --one-file-system "$out"
mv "$work/programs" "$out"
rm -rf --one-file-system "$work"
