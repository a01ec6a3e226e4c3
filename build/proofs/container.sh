#!/usr/bin/env bash
# Builds a Containerfile of build/containers where no registry of images is reached, on a Debian that debootstrap makes.
# As root, with debootstrap, podman and buildah; words after FOLDER go to `podman build`:
#
#   build/proofs/container.sh npu FOLDER
#   build/proofs/container.sh cuda FOLDER --volume CUDA:/usr/local/cuda    # a folder with nvcc
#
# Each line of the file runs, in a container; the last one lists the recipes in what was built. FOLDER gets the packages
# (7 GB and 13 GB), so that podman does not copy them into layers; it is to be deleted by hand.
set -eu

[ "$#" -ge 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
kind=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
shift 2
tree=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
base=localhost/tessera-base image=localhost/tessera-$kind

if ! podman image exists "$base"; then
  debootstrap --variant=minbase --include=ca-certificates,git,g++,python3,python3-dev,python3-pip,python3-venv \
    bookworm "$folder/root" > "$folder/debootstrap.log"
  cp -L /etc/ssl/certs/ca-certificates.crt "$folder/root/etc/ssl/certs/" # those of a registry's mirror are known here
  echo 'Acquire::Check-Valid-Until "false";' > "$folder/root/etc/apt/apt.conf.d/99mirror" # a mirror may lag behind
  tar -C "$folder/root" -c . | podman import -q - "$base"
  rm -rf "$folder/root"
fi

# What is committed, as in a fresh clone.
rm -rf "$folder/tree"
git clone -q "$tree" "$folder/tree"
# Without layers kept from before, which know nothing of FOLDER/venv. Without a runtime: where processes are counted by an old kind of cgroups none starts.
rm -rf "$folder/venv"
mkdir "$folder/venv"
podman build --no-cache --isolation chroot --network host --volume "$folder/venv:/venv" --build-arg "BASE=$base" \
  --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
  -f "$folder/tree/build/containers/$kind.Containerfile" -t "$image" "$@" "$folder/tree"

container=$(buildah from "$image")
trap 'buildah rm "$container" > /dev/null' EXIT
# An image for NPUs has torch_npu, which loads nothing without CANN; the recipes are listed without it.
away='import sys; sys.modules["torch_npu"] = None; import runpy; sys.argv = ["grpo", "--recipe", "list"]
runpy.run_module("apps.grpo.main", run_name="__main__")'
buildah run --isolation chroot --volume "$folder/venv:/venv" "$container" -- \
  env TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -c "$away"
