#!/bin/sh
# Makes fingerprint.fatbin from fingerprint.ptx: run it after every change there. Needs ptxas of CUDA 12.9, the last with which
# GPUs older than Turing can be compiled for, and fatbinary of CUDA 12.9 or later, in PATH. A test compares the two files.
set -eu
cd "$(dirname "$0")"
made=$(mktemp -d)
trap 'rm -r "$made"' EXIT

# Code for one GPU runs on all later ones of the same major version.
set --
for sm in 60 70 80 90 100 120; do
    ptxas -O3 -arch=sm_$sm -o "$made/$sm" fingerprint.ptx
    set -- "$@" "--image3=kind=elf,sm=$sm,file=$made/$sm"
done
# For GPUs of later versions.
set -- "$@" --image3=kind=ptx,sm=50,file=fingerprint.ptx

# Drivers of CUDA 12.0 and earlier know no compression but LZ4, which is `speed`. The identifier says what it was made from.
fatbinary -64 --compress-all --compress-mode=speed "--ident=fingerprint.ptx $(cksum <fingerprint.ptx)" \
    --create=fingerprint.fatbin "$@"
