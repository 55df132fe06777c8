#!/bin/sh
# Receipts of the engine on one GPU: what results/*-engine.md is made of. Needs torch, Triton and NumPy; nothing of Ray, no installed espalier.
#   benchmarks/engine_receipts.sh WORK OUT [STEP ...]
# WORK: folder for random models (35 GB). OUT: folder for logs and JSON. Steps, all by default and in this order:
#   models      an 8B- and a 27B-shaped model at 4 bits, the latter at 3.5 too
#   speed       8B: every level against solo runs, cold prompts, in smaller rounds too; mixed prompts, resumed against cold, a long prompt that arrives
#   wide        27B at both rates: 16 and 64 streams against solo runs, cold prompts
#   same        8B, few layers: the same tokens with graphs and without, on two tracks, with preemption, and in two processes at once
#   soak        8B: six minutes of random requests, a fifth of them abandoned
#   round       where a round's time goes; what exactness costs
# The exit code is that of the worst step: 0 only when nothing was unequal, failed or leaked.
set -u
WORK=$1 OUT=$2
shift 2
[ $# -gt 0 ] || set -- models speed wide same soak round
PYTHON=${PYTHON:-python3}
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH=src PYTHONUNBUFFERED=1
mkdir -p "$WORK" "$OUT"
worst=0

step() { # name command...
    name=$1 began=$(date +%s)
    shift
    "$@" >"$OUT/$name.log" 2>&1
    code=$?
    [ $code -le $worst ] || worst=$code
    echo "== $name: exit code $code, $(($(date +%s) - began)) s"
    tail -n "${LINES_SHOWN:-30}" "$OUT/$name.log"
}

bench() { # name model options...
    name=$1 model=$2
    shift 2
    step "$name" "$PYTHON" -m espalier.deploy bench --device cuda --engine "$WORK/$model" --json "$OUT/$name.json" "$@"
}

random_model() { # name shape bits options...
    [ -d "$WORK/$1" ] || "$PYTHON" -m espalier.deploy.random_model "$WORK/$1" --shape "$2" --bits "$3" --head-bits 6 ${4:-} ${5:-}
}

SAME="--context 2048 --greedy --prompt-tokens 17 --distinct 64 --tokens 500 --levels 64"
for wanted in "$@"; do
    case $wanted in
    models)
        random_model 8b qwen3-8b 4
        random_model 27b qwen3-27b 4
        random_model 27b-3.5 qwen3-27b 3.5
        random_model 8b-4 qwen3-8b 4 --layers 4
        random_model 8b-12 qwen3-8b 4 --layers 12
        ;;
    speed)
        bench speed 8b --context 16384 --levels 1,4,8,16,32,64 --prompt-tokens 512 --distinct 64 --tokens 200 --prefill 2048,8192
        bench chunks-2048 8b --context 16384 --greedy --levels 1 --prompt-tokens 17 --distinct 2 --tokens 32 --prefill 8192 --batch-tokens 2048
        bench mixed 8b --context 16384 --seeded --levels 16 --prompt-tokens 300,17,1000 --distinct 16 --tokens 200 --arrival 8192 --fresh
        ;;
    wide)
        for model in 27b 27b-3.5; do
            bench "$model" "$model" --context 16384 --levels 1,16,64 --prompt-tokens 512 --distinct 32 --tokens 96 --prefill 2048,8192
        done
        ;;
    same)
        # shellcheck disable=SC2086 (options are words)
        {
            bench graphs 8b-4 $SAME
            bench eager 8b-4 $SAME --no-cuda-graphs --same-as "$OUT/graphs.json"
            bench tracks 8b-4 $SAME --tracks 2 --same-as "$OUT/graphs.json"
            bench preempted 8b-4 $SAME --kv-tokens 12288 --same-as "$OUT/graphs.json"
            "$PYTHON" -m espalier.deploy bench --device cuda --engine "$WORK/8b-4" $SAME --memory-share 0.4 --same-as "$OUT/graphs.json" >"$OUT/beside.log" 2>&1 &
            other=$!
            bench two 8b-4 $SAME --memory-share 0.4 --same-as "$OUT/graphs.json"
            wait $other || worst=1
            tail -n 8 "$OUT/beside.log"
        }
        ;;
    soak) bench soak 8b --context 4096 --soak 360 --levels 64 --distinct 64 ;;
    round)
        for model in 8b 27b; do
            step "round-$model" "$PYTHON" -m espalier.replicas.gpu.profile "$WORK/$model" --prompts 2048 --batch-tokens 2048 --json "$OUT/round-$model.json"
        done
        step price "$PYTHON" benchmarks/price_of_exactness.py "$WORK/8b-12" --json "$OUT/price.json"
        ;;
    *)
        echo "no step is called $wanted" >&2
        exit 2
        ;;
    esac
done
exit $worst
