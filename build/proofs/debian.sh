#!/usr/bin/env bash
# Runs tests on another Debian than this machine's, from nothing, in a folder. As root, with debootstrap:
#
#   build/proofs/debian.sh trixie FOLDER                      # the fast tests: Python 3.13, Bazel 4.2.3
#   build/proofs/debian.sh sid FOLDER //libs/runlog/...       # Bazel 7.7.1
#
# FOLDER keeps the system and Bazel's folders for the next time; it takes 15 GB. bazelw installs Bazel and Python there.
# Words after FOLDER go to `bazelw test`. pip's variables hold inside.
set -eu

[ "$#" -ge 2 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
suite=$1 root=$2
shift 2
[ "$#" -gt 0 ] || set -- --keep_going //...
tree=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)

[ -e "$root/etc/debian_version" ] || debootstrap --variant=minbase --include=ca-certificates "$suite" "$root"
root=$(cd "$root" && pwd)

# FOLDER is the root of a mount namespace, as on a machine of its own: in a mere chroot the kernel lets nobody make the
# namespaces that Bazel's sandbox, and rollout's, consist of. What is mounted goes with the last process.
# shellcheck disable=SC2016
enter='mount --rbind "$0" "$0" && for one in proc dev sys; do mount --rbind "/$one" "$0/$one"; done &&
  mkdir -p "$0/.host" && cd "$0" && pivot_root . .host && umount -l /.host && exec "$@"'
inside=(unshare --mount sh -c "$enter" "$root")
inside+=(env -i "HOME=$HOME" "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin" LANG=C.UTF-8)
while read -r name; do
  case "$name" in PIP_FIND_LINKS | PIP_CONFIG_FILE) ;; *) inside+=("$name=${!name}") ;; esac
done < <(compgen -e | grep -E '^(PIP_|TESSERA_|https?_proxy$)' || true)
bazelw() { "${inside[@]}" sh -c 'cd /tree && ./bazelw "$@"' bazelw --max_idle_secs=10 "$@"; }
trap 'bazelw shutdown > /dev/null 2>&1 || true' EXIT

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
bazelw test "$@"
