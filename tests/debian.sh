#!/bin/sh
# Makes sure the Debian packages given are there: installs them as root, else names them.
# Usage: debian.sh PACKAGE=COMMAND ...   (COMMAND is what the package brings)
missing=""
for pair in "$@"; do
  command -v "${pair#*=}" >/dev/null 2>&1 || missing="$missing ${pair%%=*}"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "missing Debian packages:$missing (apt-get install --no-install-recommends$missing)" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null
