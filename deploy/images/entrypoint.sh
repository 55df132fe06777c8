#!/bin/bash
# Tells where the NVIDIA driver's library is, the first thing to know when a GPU is not used; then becomes the command.
set -euo pipefail

libcuda() {
    local folder folders
    IFS=: read -ra folders <<<"${LD_LIBRARY_PATH:-}"
    for folder in "${folders[@]}"; do
        if [[ -e "$folder/libcuda.so.1" ]]; then
            echo "$folder/libcuda.so.1"
            return
        fi
    done
    /sbin/ldconfig -p | awk '$1 == "libcuda.so.1" { print $NF; exit }'
}

found=$(libcuda)
echo "espalier: libcuda.so.1 ${found:-not found: no GPU can be used here}" >&2
exec "$@"
