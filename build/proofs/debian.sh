#!/usr/bin/env bash
# Runs tests on another Debian than this machine's, from nothing, in a chroot. As root, with debootstrap:
#
#   build/proofs/debian.sh trixie FOLDER                      # the fast tests of all libraries: Python 3.13, Bazel 4.2.3
#   build/proofs/debian.sh sid FOLDER //libs/runlog/...       # Bazel 7.7.1
#
# FOLDER keeps the system and Bazel's folders for the next time; it takes 8 GB. bazelw installs Bazel and Python there.
# Words after FOLDER go to `bazelw test`. A chroot can make no namespaces: tests run in folders of their own but see
# the machine's network, so those of the sandbox itself are left out. pip's variables hold inside.
set -eu

[ "$#" -ge 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
suite=$1 root=$2
shift 2
[ "$#" -gt 0 ] || set -- -- //libs/... //build/... -//build:selfcheck_test -//build/proofs:install_test
tree=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)

[ -e "$root/etc/debian_version" ] || debootstrap --variant=minbase --include=ca-certificates "$suite" "$root"
for folder in proc dev; do mount --bind "/$folder" "$root/$folder"; done
inside=(chroot "$root" env -i "HOME=$HOME" "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin" LANG=C.UTF-8)
while read -r name; do
  case "$name" in PIP_FIND_LINKS | PIP_CONFIG_FILE) ;; *) inside+=("$name=${!name}") ;; esac
done < <(compgen -e | grep -E '^(PIP_|TESSERA_|https?_proxy$)' || true)
bazelw() { "${inside[@]}" sh -c 'cd /tree && ./bazelw "$@"' bazelw --max_idle_secs=10 "$@"; }
finish() {
  bazelw shutdown > /dev/null 2>&1 || true
  for folder in proc dev; do umount -l "$root/$folder"; done
}
trap finish EXIT

echo 'Acquire::Check-Valid-Until "false";' > "$root/etc/apt/apt.conf.d/99mirror" # a mirror may lag behind
cp /etc/resolv.conf "$root/etc/"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/" # those of a registry's mirror are known here
mkdir -p "$root$HOME"
# What tests need and bazelw does not: git, and headers where Megatron's optimizer has torch compile.
case "$suite" in bookworm) headers=python3.11-dev ;; *) headers=python3.13-dev ;; esac
"${inside[@]}" sh -c "dpkg -s git $headers > /dev/null 2>&1 || { apt-get update -qq &&
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends git $headers g++; }" >&2
rm -rf "$root/tree"
git clone -q --no-hardlinks "$tree" "$root/tree"
bazelw test --spawn_strategy=processwrapper-sandbox --sandbox_default_allow_network "$@"
