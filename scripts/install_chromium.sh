#!/usr/bin/env bash
# Installs Debian's Chromium where there is none, for the tests of the playground; without it they are skipped.
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^[^#]/s/^# \?//p' "$0"

if command -v chromium > /dev/null; then exit 0; fi
if ! command -v apt-get > /dev/null || ((EUID)); then
    echo "install_chromium.sh: no chromium here, and only root can install Debian's: tests of the playground will be skipped" >&2
    exit 0
fi
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends chromium
