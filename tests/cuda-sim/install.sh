#!/bin/sh
# Installs the simulated libraries in a directory, under the names by which programs load them.
#
#   install.sh DIR [TARGET_DIR]
#
# TARGET_DIR is the directory in which cargo built cuda-sim and nvml-sim (default: ./target/debug).
# Programs with LD_LIBRARY_PATH=DIR load the installed libraries. To simulate an older driver, set
# WITHOUT in the environment: WITHOUT="cuCtxRecordEvent cuGetProcAddress_v2" removes these symbols.
# Set CUDA_SIM_DRIVER too, so that cuGetProcAddress doesn't find them.
set -eu

dir=${1:?usage: install.sh DIR [TARGET_DIR]}
from=${2:-target/debug}
mkdir -p "$dir"
# Copies the library under another name and renames it, so that a program that has loaded the old
# file keeps that file.
put() {
    cp "$1" "$2.new"
    for symbol in ${WITHOUT:-}; do
        # The dynamic linker compares names, so it never finds a symbol whose name was changed.
        changed=$(printf '%s' "$symbol" | sed 's/^./_/')
        LC_ALL=C sed -i "s/\x00$symbol\x00/\x00$changed\x00/g" "$2.new"
    done
    mv "$2.new" "$2"
}
put "$from/libcuda.so" "$dir/libcuda.so.1"
ln -sf libcuda.so.1 "$dir/libcuda.so"
if [ -e "$from/libnvidia_ml.so" ]; then
    put "$from/libnvidia_ml.so" "$dir/libnvidia-ml.so.1"
    ln -sf libnvidia-ml.so.1 "$dir/libnvidia-ml.so"
fi
