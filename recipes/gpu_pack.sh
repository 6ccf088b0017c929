#!/usr/bin/env bash
# Gathers what recipes/gpu_day.sh needs on a machine without a network: wheels and the small model, in pieces under 64 MB.
#   recipes/gpu_pack.sh DIR [REQUIREMENT ...]
#     REQUIREMENT   what pip should download, without dependencies (default: vllm and what this kit's run needs besides torch)
# On the other machine: `bash DIR/unpack.sh`, with its own torch at hand; it installs into the Python of $PYTHON (default:
# python) and puts the model into .cache of the folder it is started in.
#   VLLM          version of vLLM, by the other machine's torch (default: 0.26.0, for torch 2.11)
set -eu
cd "$(dirname "$0")/.."
case ${1:-} in
"" | -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0" && exit 0 ;;
esac
DIR=$1
shift
VLLM=${VLLM:-0.26.0}
PYTHON=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)
if [ $# -eq 0 ]; then
    set -- "vllm==$VLLM" "trl==1.16.0" "torchmetrics" "reasoning-gym" "lightning" "jsonargparse" "peft" "datasets" "accelerate"
fi
[ ! -e "$DIR/pieces" ] || { echo "gpu_pack.sh: DIR must be a new folder, but $DIR/pieces is there." >&2 && exit 2; }
mkdir -p "$DIR/whole" "$DIR/pieces"
"$PYTHON" -m pip download --quiet --no-deps --dest "$DIR/whole" "$@"
[ -d .cache/SmolLM2-135M-Instruct ] && tar -cf "$DIR/whole/model.tar" -C .cache SmolLM2-135M-Instruct
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
    -exec "${PYTHON:-python}" -m pip install --quiet --no-deps --no-index {} +
[ ! -e "$here/joined/model.tar" ] || tar -xf "$here/joined/model.tar" -C .cache
echo "installed: $(ls "$here/joined" | tr '\n' ' ')"
UNPACK
rm -r "$DIR/whole"
echo "$DIR: $(ls "$DIR/pieces" | wc -l) pieces, $(du -sh "$DIR" | cut -f1); on the other machine: bash $DIR/unpack.sh"
