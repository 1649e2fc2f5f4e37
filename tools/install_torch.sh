#!/bin/sh
# install_torch.sh PYTHON REQUIREMENT, say `install_torch.sh .venv/bin/python torch==2.13.0`.
# On Linux without an NVIDIA driver that installs PyTorch's build for CPUs, a fraction of the
# download, if PyTorch's own index can be reached; everywhere else, what the usual index has.
set -eu
python=$1 torch=$2
index=https://download.pytorch.org/whl/cpu

cpu_build_is_offered() {
    [ "$(uname -s)" = Linux ] && [ ! -e /proc/driver/nvidia/version ] &&
        ! command -v nvidia-smi >/dev/null && timeout 10 "$python" -c \
        "import urllib.request as r; r.urlopen('$index/torch/', timeout=5)" 2>/dev/null
}

if cpu_build_is_offered; then
    echo "Installing $torch for CPUs (no NVIDIA driver here): a download of about 200 MB, once."
    exec "$python" -m pip install --disable-pip-version-check --index-url "$index" "$torch"
fi
echo "Installing $torch: a download of 200 MB (CPU) to 3 GB (with the CUDA libraries), once."
exec "$python" -m pip install --disable-pip-version-check "$torch"
