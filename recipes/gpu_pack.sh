#!/usr/bin/env bash
# Gathers what recipes/gpu_day.sh needs on a machine without a network: wheels and the small model, in pieces under 64 MB.
#   recipes/gpu_pack.sh DIR [REQUIREMENT ...]
#     REQUIREMENT   what to bring, with its dependencies (default: vllm and what pyproject.toml names for this kit and its
#                   extras quickstart, lightning and test). Left out: torch and what comes with it (triton, NVIDIA's
#                   libraries), which the other machine has. It needs a C compiler and Python's headers, as Triton does:
#                   pycosat, which reasoning-gym imports, has no wheel.
# On the other machine: `bash DIR/unpack.sh`, with its own torch at hand; it installs into the Python of $PYTHON (default:
# python) and puts the model into .cache of the folder it is started in. That folder is to be a checkout.
#   VLLM            version of vLLM, by the other machine's torch (default: 0.26.0, for torch 2.11)
#   PYTHON_VERSION  the other machine's, such as 3.12 (default: that of the Python here)
#   PLATFORM        the other machine's, as its wheels name it (default: that of this machine; with PYTHON_VERSION the manylinux
#                   names of x86_64). Versions are always those that pip finds for this machine, so it must be a Linux.
set -eu
cd "$(dirname "$0")/.."
case ${1:-} in
"" | -h | --help) sed -n '2,15s/^# \{0,1\}//p' "$0" && exit 0 ;;
esac
for name in pyproject.toml benchmarks tests scripts; do
    [ -e "$name" ] || { echo "gpu_pack.sh needs a checkout (git clone trl-offpolicy), but there is no $name beside recipes." >&2 && exit 2; }
done
DIR=$1
shift
VLLM=${VLLM:-0.26.0}
PYTHON=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)
[ ! -e "$DIR/pieces" ] || { echo "gpu_pack.sh: DIR must be a new folder, but $DIR/pieces is there." >&2 && exit 2; }
mkdir -p "$DIR/whole" "$DIR/pieces"

if [ $# -eq 0 ]; then
    # setuptools and wheel build what has no wheel, over there without a network
    wanted=$("$PYTHON" - <<'PY'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = [name for extra in ("quickstart", "lightning", "test") for name in project["optional-dependencies"][extra]]
print("\n".join(one.replace(" ", "") for one in (*project["dependencies"], *extras)))
PY
    )
    mapfile -t names <<<"$wanted"
    set -- "vllm==$VLLM" "${names[@]}" setuptools wheel
fi

# which versions go together: nothing is installed
"$PYTHON" -m pip install --quiet --dry-run --ignore-installed --report "$DIR/whole/report.json" "$@"
"$PYTHON" - "$DIR/whole/report.json" >"$DIR/whole/wanted.txt" <<'PY'
import json, re, sys
def plain(name): return re.sub(r"[-_.]+", "-", name).lower()
found = {plain(one["metadata"]["name"]): one for one in json.load(open(sys.argv[1]))["install"]}
asks = {name: {plain(re.match(r"[\w.-]+", text)[0]) for text in one["metadata"].get("requires_dist", ())} for name, one in found.items()}
with_torch, new = set(), {"torch"}
while new:  # torch, what it asks for, what that asks for
    with_torch |= new
    new = {name for one in new for name in asks.get(one, ())} - with_torch
left = {name for name in with_torch if re.match(r"(torch|triton|nvidia-.*|cuda-.*)$", name)}
for name, one in found.items():
    version = one["metadata"]["version"]
    if name in left: print(f"left out: {name} {version}", file=sys.stderr)
    else: print(f'{name} @ {one["download_info"]["url"]}' if one.get("is_direct") else f"{name}=={version}")
PY
OTHER=()
if [ -n "${PYTHON_VERSION:-}${PLATFORM:-}" ]; then
    OTHER=(${PYTHON_VERSION:+--python-version "$PYTHON_VERSION"})
    for name in ${PLATFORM:-$(printf 'manylinux_2_%s_x86_64 ' 35 34 31 28 27 26 24 17) manylinux2014_x86_64 manylinux1_x86_64}; do
        OTHER+=(--platform "$name")
    done
fi
mapfile -t names <"$DIR/whole/wanted.txt"
rm "$DIR/whole/report.json" "$DIR/whole/wanted.txt"
"$PYTHON" -m pip download --quiet --no-deps "${OTHER[@]}" --dest "$DIR/whole" "${names[@]}"
if [ -d .cache/SmolLM2-135M-Instruct ]; then
    tar -cf "$DIR/whole/model.tar" -C .cache SmolLM2-135M-Instruct
else
    echo "left out: the model; \`make model\` makes it in .cache" >&2
fi
for file in "$DIR"/whole/*; do
    split --bytes=60M --numeric-suffixes --suffix-length=3 "$file" "$DIR/pieces/$(basename "$file").part"
done
(cd "$DIR/whole" && sha256sum -- *) >"$DIR/SHA256SUMS"
cat >"$DIR/unpack.sh" <<'UNPACK'
#!/usr/bin/env bash
# Joins the pieces, checks them, installs the wheels without dependencies, and unpacks the model into .cache.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$here/joined" .cache
for first in "$here"/pieces/*.part000; do
    name=$(basename "$first" .part000)
    cat "$here/pieces/$name".part* >"$here/joined/$name"
done
(cd "$here/joined" && sha256sum --quiet --check ../SHA256SUMS)
find "$here/joined" \( -name '*.whl' -o -name '*.tar.gz' \) \
    -exec "${PYTHON:-python}" -m pip install --quiet --no-deps --no-index --find-links "$here/joined" {} +
[ ! -e "$here/joined/model.tar" ] || tar -xf "$here/joined/model.tar" -C .cache
echo "installed: $(ls "$here/joined" | tr '\n' ' ')"
UNPACK
rm -r "$DIR/whole"
echo "$DIR: $(ls "$DIR/pieces" | wc -l) pieces, $(du -sh "$DIR" | cut -f1); on the other machine: bash $DIR/unpack.sh"
