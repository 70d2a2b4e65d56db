#!/bin/sh
# Creates a signed apt repository of packages. It can be served by any web server or used in place.
#
#   apt-repository.sh PACKAGES REPOSITORY   PACKAGES: a directory with .debs, of one version or several
#
# KEY: the signing key, by any name that gpg knows; without KEY, a key for tests is created beside REPOSITORY. URL:
# the repository's address for hosts [default: REPOSITORY itself, by file:]. A second run replaces the result of the
# first.
set -eu

[ $# = 2 ] || { echo "usage: [KEY=… URL=…] $0 PACKAGES REPOSITORY" >&2; exit 2; }
packages=$1
mkdir -p "$2"
repository=$(realpath "$2")
url=${URL:-file:$repository}
suite=stable
# The component is the same as in the packages (debian/control).
component=contrib

ls "$packages"/*.deb >/dev/null 2>&1 || { echo "there are no packages in $packages: make deb" >&2; exit 1; }

key=${KEY:-}
if [ -z "$key" ]; then
    # The private key exists only on this host, so the repository is as trustworthy as the key's
    # directory.
    export GNUPGHOME="$repository.key"
    key=nvshare-test-repository
    mkdir -p "$GNUPGHOME"
    chmod 700 "$GNUPGHOME"
    # Without this command, the agent would keep running and using the directory.
    trap 'gpgconf --kill gpg-agent 2>/dev/null || true' EXIT
    gpg --batch --list-secret-keys $key >/dev/null 2>&1 ||
        gpg --batch --quiet --passphrase '' --quick-generate-key $key ed25519 sign never
    echo "signed by a key for tests, in $GNUPGHOME: name yours with KEY=" >&2
fi

rm -rf "$repository/pool" "$repository/dists"
pool=pool/$component/n/nvshare
dist=$repository/dists/$suite
mkdir -p "$repository/$pool"
cp "$packages"/*.deb "$repository/$pool"

cd "$repository"
architectures=$(for deb in "$pool"/*.deb; do dpkg-deb --field "$deb" Architecture; done | sort -u)
for architecture in $architectures; do
    index=$dist/$component/binary-$architecture
    mkdir -p "$index"
    apt-ftparchive --arch "$architecture" packages pool >"$index/Packages"
    gzip -9nk "$index/Packages"
    xz -9k "$index/Packages"
done
# Files are also available by hash. An apt update during an upload therefore gets either only old
# files or only new files.
apt-ftparchive release \
    -o APT::FTPArchive::DoByHash=true \
    -o APT::FTPArchive::Release::Acquire-By-Hash=yes \
    -o APT::FTPArchive::Release::Origin=nvshare \
    -o APT::FTPArchive::Release::Label=nvshare \
    -o APT::FTPArchive::Release::Suite=$suite \
    -o APT::FTPArchive::Release::Codename=$suite \
    -o APT::FTPArchive::Release::Architectures="$(echo "$architectures" | paste -sd ' ')" \
    -o APT::FTPArchive::Release::Components=$component \
    "$dist" >"$repository/Release.new"
mv "$repository/Release.new" "$dist/Release"
gpg --batch --yes --quiet --local-user "$key" --clearsign --output "$dist/InRelease" "$dist/Release"
gpg --batch --yes --quiet --local-user "$key" --armor --detach-sign --output "$dist/Release.gpg" "$dist/Release"

gpg --batch --yes --quiet --export --output "$repository/nvshare.gpg" "$key"
cat >"$repository/nvshare.sources" <<END
Types: deb
URIs: $url
Suites: $suite
Components: $component
Signed-By: /etc/apt/keyrings/nvshare.gpg
END
chmod -R a+rX "$repository"

cat <<END
$repository has $(find "$pool" -name '*.deb' | wc -l) packages. On hosts that find it at $url:
  sudo install -m 644 nvshare.gpg /etc/apt/keyrings/
  sudo install -m 644 nvshare.sources /etc/apt/sources.list.d/
  sudo apt update && sudo apt install nvshare
END
