#!/usr/bin/env bash
# Checks and measures pp on a machine with NVIDIA GPUs and writes one JSON file.
#
#   gpu-check.sh [--out FILE.json] [--only REGEX] [--budget SECONDS] [--runs N] [--memory DIR] [--list]
#
# It lies in the directory that `cargo xtask bundle` makes, beside what it runs, and needs two GPUs, NCCL,
# compute-sanitizer, bash and the usual small programs. On one GPU two ranks share it in the steps of the copy engine that check
# bytes and ends: p2p-* as the machine is, and mps-* under an MPS that the script starts and ends, unless another one runs.
# fault-rules and fault-shutdown-* run over NCCL there, too, with a host name for each rank. fault-shutdown-cut needs iproute2. What
# needs two GPUs is skipped and named. The programs to compare with, in peers/, need python3 with torch,
# and nvcc with cuBLAS; what is not found is skipped. PEERS=DIR adds every *.cu (built with NCCL) and *.py (two ranks, started by
# torch.distributed.run) of a directory. --memory names a file system in memory with 17 GB free (/dev/shm unless told): one
# that is mounted with huge=always lets several threads write at once, where small pages let the kernel fill 4 to 5 GB/s.
#
# Every step has a limit, and a step that fails does not stop the next. The end is 1 if a required step failed or could
# not run, or one of the faults at the end failed, 2 for a wrong use, 130 or 143 after SIGINT or SIGTERM, which end the step
# that runs, else 0. A figure that misses its mark is marked and fails nothing. A step that the budget ends, or that has not begun
# by then, is "no time", and fails only if it is required. So run what comes last by itself: the faults with --only
# '^fault-shutdown' and '^fault-[^s]'; edges over the copy engine with --only '^p2p-(limit|link|overlap|film)' and '^p2p-kills';
# payloads between a CPU and a GPU with --only '^(cpu-|p2p-limit)'; two ranks on one GPU under MPS with --only '^mps-'.
set -u -o pipefail

usage() { sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p}' "$0"; }
fail() { echo "gpu-check: $*" >&2; exit 2; }

here=$(cd "$(dirname "$0")" && pwd)
out=gpu-check.json only=. budget=530 runs=3 memory=/dev/shm list=
while (($#)); do
    case $1 in
        --out | --only | --budget | --runs | --memory)
            (($# > 1)) || fail "$1 wants a value"
            printf -v "${1#--}" %s "$2"
            shift 2 ;;
        --list) list=1; shift ;;
        -h | --help) usage; exit 0 ;;
        *) fail "no option $1; --help says which there are" ;;
    esac
done
[[ $budget =~ ^(0|[1-9][0-9]{0,5})$ && $runs =~ ^[1-9]$ ]] || fail "--budget wants seconds, up to 999999, and --runs a number from 1 to 9"
[[ '' =~ $only ]] || (($? < 2)) || fail "--only $only is no regular expression"
work=$(mktemp -d) || fail "no place for temporary files"
films=$(mktemp -d -p "$memory") || fail "--memory names a directory to write to, such as /dev/shm"
under=() # what a step is run by, while there is an MPS of our own
end_mps() {
    ((${#under[@]})) || return 0
    timeout 30 "${under[@]}" "$mps" <<<quit || kill "$(<"$work/mps/nvidia-cuda-mps-control.pid")"
    under=()
} &>/dev/null
trap 'end_mps; rm -rf "$work" "$films" "$out.part"' EXIT
# An interrupt ends the step that runs, and what was done until then is written.
stopped= child=
stop() {
    stopped=$1
    # The whole group, once timeout has made one: a timeout that has only just started its command ends without it.
    [[ ! $child ]] || kill -- "-$child" || kill "$child"
} 2>/dev/null
trap 'stop 130' INT
trap 'stop 143' TERM
pp=$here/bin/pp
trials=$here/bin/pp-trials
clip=$here/clip/cup.y4m
more=
[[ -z ${PEERS:-} ]] || more=$(cd "$PEERS" && pwd) || fail "PEERS names no directory"
# Nine minutes of work are not to end with this.
[[ $list ]] || { [[ ! -d $out ]] && : >"$out.part"; } 2>/dev/null || fail "cannot write $out; it must be a file in a directory that exists"

# --- what is here ---------------------------------------------------------------------------------------------------

# The first program that can be run: on PATH, or in the toolkit's directory.
program() {
    local place
    for place in "$(command -v "$1")" "${CUDA_HOME:-/usr/local/cuda}/bin/$1"; do
        [[ -x $place ]] && { echo "$place"; return; }
    done
    return 1
}
smi=$(program nvidia-smi) || smi=
nvcc=$(program nvcc) || nvcc=
sanitizer=$(program compute-sanitizer) || sanitizer=
no_sanitizer="compute-sanitizer is not found; it comes with the CUDA toolkit"
python=$(command -v python3) || python=
gpus=0
if [[ $smi ]]; then
    gpus=$(timeout 30 "$smi" --query-gpu=index --format=csv,noheader 2>/dev/null | grep -c '^[0-9]') || true
fi
torch=
if [[ $python && -z $list ]] && timeout 60 "$python" -c 'import torch; torch.cuda.is_available() or exit(1)' 2>/dev/null; then
    torch=1
fi
# How peers in C++ find NCCL: with that of python3, as PyTorch does, or else as the compiler finds it.
with_nccl=(-lnccl) wheel=
if [[ $python ]]; then
    root=$(timeout 30 "$python" -c 'import importlib.util as u; s = u.find_spec("nvidia.nccl"); print(list(s.submodule_search_locations)[0])' 2>/dev/null) &&
        with_nccl=(-I"$root/include" -L"$root/lib" -l:libnccl.so.2 -Xlinker "-rpath=$root/lib") wheel=$root/lib/libnccl.so.2
    [[ -f $wheel ]] || wheel=
fi

# --- steps ----------------------------------------------------------------------------------------------------------

steps=() # one JSON object each
lost=()  # required steps that failed or could not run
count=0

# Text as a JSON string. What is no ASCII becomes a question mark.
quote() {
    local text
    text=$(LC_ALL=C tr -c '\11\12\15\40-\176' '?')
    text=${text//\\/\\\\} text=${text//\"/\\\"}
    text=${text//$'\t'/\\t} text=${text//$'\r'/} text=${text//$'\n'/\\n}
    printf '"%s"' "$text"
}

# The JSON objects at the ends of lines, as the inside of an array. Python writes NaN, which JSON does not have.
objects() {
    local found
    found=$(grep -aoE '\{".*\}$' "$1" | sed -E 's/([:,[ ])-?(NaN|Infinity)/\1null/g')
    printf '%s' "${found//$'\n'/,}"
}

record() { # NAME NEED STATUS SECONDS CODE [DIRECTORY]
    local name=$1 need=$2 status=$3 seconds=$4 code=$5 at=${6:-} results='' text='""' report=null
    if [[ $at ]]; then
        results=$(objects "$at/stdout")
        text=$( { grep -av '^{.*}$' "$at/stdout"; tail -c 4000 "$at/stderr"; } | tail -c 6000 | quote)
        [[ -s $at/report.json ]] && report=$(tr '\n' ' ' <"$at/report.json")
    elif [[ $code != null ]]; then
        text=$(quote <<<"$code") code=null
    fi
    steps+=("{\"name\":\"$name\",\"required\":$([[ $need == required ]] && echo true || echo false),\"status\":\"$status\",\"seconds\":$seconds,\"exit\":$code,\"results\":[$results],\"report\":$report,\"text\":$text}")
    # What is "held" need not run; if it does, it must pass.
    case $need:$status in
        required:passed) ;;
        required:* | held:failed | held:"timed out") lost+=("$name") ;;
    esac
    printf '%-34s %-9s %6.1f s\n' "$name" "$status" "$seconds"
}

wanted() { [[ ! $stopped && $1 =~ $only ]]; }

skip() { # NAME NEED WHY
    wanted "$1" || return 0
    if [[ $list ]]; then echo "$1 (skipped: $3)"; return; fi
    record "$1" "$2" skipped 0 "$3"
}

# Whether a step has what it needs; it is skipped where that is empty.
has() { # WHAT NAME NEED WHY
    [[ $1 ]] || { skip "${@:2}"; return 1; }
}

# step NAME required|held|optional SECONDS COMMAND...: runs the command in a directory of its own.
step() {
    local name=$1 need=$2 limit=$3 code status began ended looks
    shift 3
    wanted "$name" || return 0
    if [[ $list ]]; then echo "$name"; return; fi
    local left=$((budget - SECONDS))
    if ((left < 3)); then
        record "$name" "$need" "no time" 0 "the budget of $budget s was spent"
        return
    fi
    local late="timed out"
    ((limit > left)) && limit=$left late="no time"
    local at=$work/$((++count))
    mkdir "$at"
    began=${EPOCHREALTIME/[.,]/}
    # Kills the whole group of processes, the ranks of a job among them, and gives the command the SIGINT that bash takes from
    # what runs in the background.
    (cd "$at" && exec timeout --kill-after=5 "$limit" "${under[@]}" "$@" >stdout 2>stderr </dev/null) &
    child=$!
    # The interrupt may have come before there was a child to end.
    [[ ! $stopped ]] || stop "$stopped"
    while wait "$child"; code=$?; kill -0 "$child" 2>/dev/null; do :; done
    if [[ $stopped ]]; then
        # What timeout did not wait for has as long as it gives.
        for ((looks = 0; looks < 50; looks++)); do
            kill -0 -- "-$child" || break
            sleep 0.1
        done
        kill -KILL -- "-$child"
    fi 2>/dev/null
    child=
    ended=${EPOCHREALTIME/[.,]/}
    case $code in
        0) status=passed ;;
        124 | 137) status=$late ;;
        *) status=failed ;;
    esac
    [[ ! $stopped ]] || status=interrupted
    local micros=$((ended - began))
    record "$name" "$need" "$status" "$((micros / 1000000)).$(printf '%03d' $((micros / 1000 % 1000)))" "$code" "$at"
    [[ $status == passed ]]
}

hindrance= # why no step of GPUs can run

# A step that needs so many GPUs.
gpu_step() { # GPUS NAME NEED SECONDS COMMAND...
    local need=$1
    shift
    if [[ $hindrance ]]; then
        skip "$1" "$2" "$hindrance"
        return 1
    elif ((gpus < need)); then
        # A machine with one GPU is checked for what it can do.
        local weight=$2
        ((gpus)) && weight=optional
        skip "$1" "$weight" "too few GPUs: $gpus of $need"
        return 1
    fi
    step "$@"
}

# --- figures --------------------------------------------------------------------------------------------------------

figures=()
rows=()

# Every value of a number: from each step whose name begins so, the first one behind the pattern in one object.
values() { # PREFIX PATTERN FIELD
    local step
    for step in "${steps[@]}"; do
        [[ $step == "{\"name\":\"$1"* ]] || continue
        grep -oE "$2[^}]*\"$3\": ?-?[0-9][0-9.eE+-]*" <<<"$step" | head -n 1 | grep -oE -- '-?[0-9][0-9.eE+-]*$'
    done
}
# The middle one of some numbers.
median() {
    local all count
    all=$(sort -g)
    count=$(wc -l <<<"$all")
    sed -n "$(((count + 1) / 2))p" <<<"$all"
}

# show NAME VALUE RUNS [min|max MARK]: one figure, and whether it meets its mark.
show() {
    local name=$1 value=$2 count=$3 met=null mark=null shown=$2
    if (($# > 3)); then
        mark=$5
        local first
        first=$(printf '%s\n%s\n' "$value" "$mark" | sort -g | head -n 1)
        met=false
        [[ $value == "$mark" || ($4 == min && $first == "$mark") || ($4 == max && $first == "$value") ]] && met=true
        shown="$value ($4 $mark: $([[ $met == true ]] && echo met || echo MISSED))"
    fi
    figures+=("{\"name\":\"$name\",\"value\":$value,\"runs\":$count,\"mark\":$mark,\"met\":$met}")
    rows+=("$(printf '%-46s %s, %s runs' "$name" "$shown" "$count")")
}

# figure NAME PREFIX PATTERN FIELD [min|max MARK]: the median over the runs.
figure() {
    local name=$1 all
    all=$(values "$2" "$3" "$4")
    shift 4
    [[ $all ]] || return 0
    show "$name" "$(median <<<"$all")" "$(wc -l <<<"$all")" "$@"
}

# ratio NAME PREFIX PATTERN FIELD  PREFIX PATTERN FIELD  [min|max MARK]: the median of the former over that of the latter;
# excess: by how much the former is larger.
ratio() { compare '1000 * ours / theirs' "$@"; }
excess() { compare '(ours - theirs) / 1000' "$@"; }
compare() { # THOUSANDTHS NAME ...
    local how=$1 name=$2 all ours theirs result
    all=$(values "$3" "$4" "$5")
    theirs=$(values "$6" "$7" "$8")
    shift 8
    [[ $all && $theirs ]] || return 0
    printf -v ours %.0f "$(median <<<"$all")e6"
    printf -v theirs %.0f "$(median <<<"$theirs")e6"
    ((theirs > 0)) || return 0
    printf -v result %.3f "$((how))e-3"
    show "$name" "$result" "$(wc -l <<<"$all")" "$@"
}

# trips NAME PREFIX MARK  PREFIX PATTERN: round trips, one at a time, beside those by hand.
trips() {
    [[ $(values "$2" '' latency_ms) ]] || return 0
    figure "ms of a round trip, $1" "$2" '' latency_ms
    figure "  the 99th percentile" "$2" '' latency_p99_ms
    figure "  the same by hand" "$4" "$5" ms
    figure "  the 99th percentile by hand" "$4" "$5" ms_p99
    ratio "  over that by hand" "$2" '' latency_ms "$4" "$5" ms max "$3"
}

# --- what is done ---------------------------------------------------------------------------------------------------

nccl=(--transport nccl)
p2p=(--transport p2p)
# Two ranks share the only GPU.
shared=()
((gpus == 1)) && shared=(--devices "cuda:0,cuda:0")
spin=(--simulate gpu-spin)
# A kernel of no length in front of each message, one at a time: its latency is the round trip.
behind=(--sync --chunks 3000 --stages "0.0001,0.0001,0" --pipeline "s0@0,s1@1,s2@0")

correctness() {
    gpu_step 1 doctor required 30 "$pp" doctor
    gpu_step 1 kernels-oracle required 90 env PP_TEST_GPU=real "$here/tests/gpu_oracle"
    gpu_step 1 kernels-oracle-cust required 90 env PP_TEST_GPU=real PP_TEST_KERNELS="$here/plugins/cust.so" "$here/tests/gpu_oracle"
    local plugin
    for plugin in median temporal; do
        step "plugin-$plugin" required 60 "$pp" plugin check "$here/plugins/$plugin.so"
    done
    gpu_step 1 plugin-cust required 60 "$pp" plugin check "$here/plugins/cust.so"
    gpu_step 2 conformance required 180 env PP_TEST_GPU=real "$here/tests/conformance" --test-threads=1
    gpu_step 2 race required 90 env PP_TEST_GPU=real "$here/tests/race" --nocapture raw_nccl
    gpu_step 2 race-no-p2p required 90 env PP_TEST_GPU=real NCCL_P2P_DISABLE=1 "$here/tests/race" --nocapture raw_nccl
    gpu_step 1 race-copies required 90 env PP_TEST_GPU=real "$here/tests/race" --nocapture copy_engine
}

# The clip through two GPUs, and the same on the processor, whose PSNR it must come near.
job() {
    local noisy=(--input "$clip" --add-noise 20 --report report.json)
    gpu_step 2 job required 60 "$pp" run "${nccl[@]}" --kernels ptx "${noisy[@]}" --output out.y4m
    # The same kernels through another CUDA library: the same output, bit for bit.
    gpu_step 2 job-cust required 60 bash -c 'for kernels in ptx "$1"; do
            "$0" run --transport nccl --kernels "$kernels" --input "$2" --add-noise 20 --output "${kernels##*/}.y4m" || exit
        done; cmp ptx.y4m cust.so.y4m' "$pp" "$here/plugins/cust.so" "$clip"
    gpu_step 2 job-identity required 60 bash -c \
        '"$0" run --transport nccl --kernels ptx --denoise-steps 0 --input "$1" --output out.y4m && cmp "$1" out.y4m' "$pp" "$clip"
    # Wherever the stages stand, the output is that of one GPU, bit for bit.
    gpu_step 2 placements required 120 "$trials" placements --part gpu "${nccl[@]}" --input "$clip"
    step job-host optional 90 "$pp" run --transport host --kernels cpu "${noisy[@]}"
    has "$python" 720p optional "needs python3 to make the clip" || return
    if ((gpus)) && [[ ! $list ]] && { wanted 720p-unwritten-1 || wanted 720p-written-1 || wanted video-720p || wanted 720p-restarts-1 || wanted 720p-one-1 || wanted p2p-film-p2p-1; }; then
        timeout 90 "$python" "$here/peers/tile.py" "$clip" "$films/in.y4m" 1280 720 4000
    fi
    local run any=(--kernels ptx --cuts off --frames-per-chunk 8 --report report.json --input)
    local film=("${nccl[@]}" "${any[@]}" "$films/in.y4m")
    gpu_step 1 video-720p optional 90 "$pp" bench video --input "$films/in.y4m" --output "$films/out.y4m" --frames-per-chunk 8 --json
    for ((run = 1; run <= runs; run++)); do
        gpu_step 2 "720p-unwritten-$run" optional 60 "$pp" run "${film[@]}"
        gpu_step 2 "720p-written-$run" optional 60 "$pp" run "${film[@]}" --output "$films/out.y4m"
        gpu_step 2 "p2p-film-nccl-$run" optional 60 "$pp" run "${film[@]}" --output "$films/out.y4m"
        gpu_step 2 "p2p-film-p2p-$run" held 60 bash -c '"$@" && cmp "$0/out.y4m" "$0/p2p.y4m"; code=$?; rm -f "$0/p2p.y4m"; exit $code' \
            "$films" "$pp" run "${p2p[@]}" "${any[@]}" "$films/in.y4m" --output "$films/p2p.y4m"
        gpu_step 2 "720p-restarts-$run" optional 60 "$pp" run "${film[@]}" --restarts 3
        gpu_step 1 "720p-one-$run" optional 60 "$pp" run "${any[@]}" "$films/in.y4m" --ranks 1
        gpu_step 2 "720p-parts-$run" optional 60 "$pp" run "${film[@]}" --pipeline encode@0,phase_b@0,phase_b@1,decode@1
    done
    rm -f "$films"/*
    # One pass, so that nothing but a group can share it.
    if ((gpus)) && [[ ! $list ]] && wanted 1080p-one-1; then
        timeout 90 "$python" "$here/peers/tile.py" "$clip" "$films/in.y4m" 1920 1080 1600
    fi
    for ((run = 1; run <= runs; run++)); do
        gpu_step 1 "1080p-one-$run" optional 60 "$pp" run "${any[@]}" "$films/in.y4m" --denoise-steps 1 --ranks 1
        gpu_step 2 "1080p-group-$run" optional 60 "$pp" run "${film[@]}" --denoise-steps 1 --pipeline encode@0,phase_b@0+1,decode@0
    done
    rm -f "$films"/*
}

benchmarks() { # RUN
    local run=$1 ms
    # Slots of their own size: between slots that lie further apart, addresses take longer to translate.
    gpu_step 2 "link-$run" optional 60 "$pp" bench link "${nccl[@]}" --max-bytes 22118400 --json
    gpu_step 2 "large-link-$run" optional 60 "$pp" bench link "${nccl[@]}" --max-bytes $((1 << 30)) --json
    for ms in 0.2 1 5 0; do
        gpu_step 2 "overlap-22M-${ms}ms-$run" optional 30 "$pp" bench overlap "${nccl[@]}" "${spin[@]}" \
            --bytes 22118400 --decode-ms "$ms" --phase-b-ms "$ms" --json
    done
    gpu_step 2 "overlap-64K-0ms-$run" optional 30 "$pp" bench overlap "${nccl[@]}" "${spin[@]}" \
        --bytes 65536 --decode-ms 0 --phase-b-ms 0 --json
    gpu_step 1 "kernels-$run" optional 60 "$pp" bench kernels --json
}

once() {
    local load
    for load in gemm hbm; do
        gpu_step 2 "overlap-22M-$load" optional 30 "$pp" bench overlap "${nccl[@]}" --simulate "$load" \
            --bytes 22118400 --decode-ms 1 --phase-b-ms 1 --json
    done
    gpu_step 2 nonblocking optional 60 "$pp" bench link "${nccl[@]}" --non-blocking --max-bytes $((64 << 20)) --json
    gpu_step 2 memory optional 60 "$pp" bench overlap "${nccl[@]}" "${spin[@]}" \
        --bytes 22118400 --decode-ms 0.2 --phase-b-ms 0.2 --chunks 10000 --json
}

# What happens when something breaks. The steps look after themselves, so each has a bound of its own beside this one.
faults() {
    # Every fault that can be made, in a real job, and what its ranks do. Each rank that shares a GPU has a host name of its own.
    gpu_step 1 fault-rules held 240 "$trials" faults "${nccl[@]}" --json
    # Every state of ours against everything that may become of the peer.
    # One job at a time: its bounds assume that nothing else runs, and jobs that end NCCL hold each other up.
    local cells
    for cells in /killed /left /stopped /cut "/computing /interrupted"; do
        [[ $cells != /cut ]] || has "$(program ip)" fault-shutdown-cut held "needs ip, of iproute2" || continue
        read -ra cells <<<"$cells"
        gpu_step 1 "fault-shutdown-${cells#/}" held 250 "$trials" shutdown --transport nccl --json --only "${cells[@]}"
    done
    # Rank 1 dies three times, and the output is the undisturbed one.
    gpu_step 2 fault-restart held 90 bash -c '"$0" run --transport nccl --kernels ptx --input "$1" --output calm.y4m &&
        PP_FAULT=kill@1:chunk=2:times=3 "$0" run --transport nccl --kernels ptx --input "$1" --restarts 5 --output again.y4m --report report.json &&
        cmp calm.y4m again.y4m' "$trials" "$clip"
    # Digests of all tensors of every chunk, on both sides, and what that costs beside a run without.
    local how
    for how in off every=1; do
        gpu_step 2 "fault-verify-${how#every=}" held 60 "$pp" run "${nccl[@]}" --kernels ptx --input "$clip" --cuts off --verify "$how" --report report.json
    done
    # An NCCL that can revoke, if python3 brings one: what is aborted, and what is connected again.
    has "$wheel" fault-revoke optional "needs the NCCL that comes with python3's packages" &&
        gpu_step 2 fault-revoke held 150 env PP_TEST_GPU=real PP_NCCL_LIB="$wheel" "$here/tests/conformance" --test-threads=1 abort generation
    torch_peer 2 fault-torch 180 "$here/peers/torch_faults.py" --jobs 12
}

# Starts an MPS of our own for the steps that follow, or leaves in `hindrance` why there is none.
start_mps() {
    mps=$(program nvidia-cuda-mps-control) || { hindrance="nvidia-cuda-mps-control is not found"; return; }
    # A word of a command line names the daemon or a server. A process that has ended and waits to be reaped has none.
    grep -qszE '^([^ ]*/)?nvidia-cuda-mps-(control|server)$' /proc/[0-9]*/cmdline && { hindrance="another MPS runs; end it with: echo quit | nvidia-cuda-mps-control"; return; }
    mkdir "$work/mps" "$work/mps-log"
    under=(env CUDA_MPS_PIPE_DIRECTORY="$work/mps" CUDA_MPS_LOG_DIRECTORY="$work/mps-log")
    timeout 30 "${under[@]}" "$mps" -d >"$work/mps-log/start" 2>&1 </dev/null &&
        [[ $(timeout 60 "${under[@]}" "$pp" doctor 2>&1) == *"under MPS"* ]] && return
    end_mps
    hindrance="MPS cannot start: $(tail -qn 2 "$work"/mps-log/*)"
}

# Two ranks over the copy engine, which share the only GPU: bytes and ends, and there round trips beside the limit by hand.
p2p_pair() { # PREFIX OF THE NAMES
    # Whatever carries the payloads, the output is the same, bit for bit.
    gpu_step 1 "$1-jobs" held 150 bash -c 'run() { "$pp" run --kernels ptx --input "$clip" --output out.y4m "$@" &&
            if [[ -f first.y4m ]]; then cmp first.y4m out.y4m; else mv out.y4m first.y4m; fi || exit; }
        pp=$0 trials=$1 clip=$2 devices=$3
        if [[ $devices ]]; then run --ranks 1 --denoise-steps 4; else run --transport nccl --denoise-steps 4; fi
        for how in auto p2p "p2p --recompute" "p2p --restarts 3" "p2p --verify every=1" "p2p --depth 1"; do
            run --denoise-steps 4 --ranks 2 $devices --transport $how
        done
        for pipeline in phase_b@1,decode@0 phase_b@0,decode@1 phase_b@0,phase_b@1,decode@1 phase_b@0+1,decode@0 "(phase_b@0,phase_b@1)*2,decode@0"; do
            # A group wants a GPU for each member.
            [[ $devices && $pipeline == *+* ]] || run --transport p2p --denoise-steps 4 $devices --pipeline "encode@0,$pipeline"
        done
        pp=$trials
        PP_FAULT=kill@1:chunk=2:times=3 run --transport p2p --denoise-steps 4 --ranks 2 $devices --restarts 5' \
        "$pp" "$trials" "$clip" "${shared[*]}"
    ((gpus > 1)) || gpu_step 1 "$1-placements" held 150 "$trials" placements --part gpu "${p2p[@]}" --input "$clip"
    gpu_step 1 "$1-words" held 300 bash -c '"$0" words "$@" && "$0" words "$@" --max-bytes 65536 --seed 2' "$trials" "${p2p[@]}" "${shared[@]}" --json
    native_peer 1 "$1-limit" 175 "$here/peers/copy_engine.cu" -lcuda -lcublas
    local run bytes
    for ((run = 1; gpus < 2 && run <= runs; run++)); do
        for bytes in 4 22118400; do
            gpu_step 1 "$1-behind-$bytes-$run" optional 30 "$pp" bench overlap "${p2p[@]}" "${shared[@]}" --json --bytes "$bytes" "${behind[@]}"
        done
    done
    gpu_step 1 "$1-kills" held 400 "$trials" kills "${p2p[@]}" --json
    gpu_step 1 "$1-faults" held 240 "$trials" faults "${p2p[@]}" --json
    gpu_step 1 "$1-shutdown" held 300 "$trials" shutdown "${p2p[@]}" --jobs 3 --json
}

# Another client of the GPU fails while a job runs that may start ranks again: the job ends, and says that the GPU is shared.
mps_client() {
    has "$nvcc" mps-client held "needs nvcc" || return
    gpu_step 1 mps-client held 60 bash -c '"$0" -o fault "$1" || exit
        { cat "$3"; while tail -n +2 "$3"; do :; done; } 2>film | "$2" run --input - --pipeline encode@0,phase_b@1,phase_b@2,decode@0 \
            --devices cpu,cuda:0,cuda:0 --restarts 5 --output - 2>said > >(head -c 1000000 >/dev/null; : >flows; cat >/dev/null) &
        until [[ -e flows ]]; do kill -0 "$!" && sleep 0.1 || exit; done
        ./fault; code=$? began=${EPOCHREALTIME/[.,]/}
        wait "$!"; ended=$? ms=$(((${EPOCHREALTIME/[.,]/} - began) / 1000)); cat said
        echo "{\"what\":\"mps_client\",\"ms\":$ms}"
        ((code == 0 && ended == 12 && ms < 1000)) && grep -q "error: shared device" said' \
        "$nvcc" "$here/peers/client_fault.cu" "$pp" "$clip"
}

# Payloads between a CPU and a GPU.
cpu_edges() {
    local beside=(--devices "cpu,cuda:0") run ms bytes load
    gpu_step 1 cpu-placements held 150 "$trials" placements --part gpu --transport p2p --beside-cpus --input "$clip"
    gpu_step 1 cpu-words held 300 bash -c '"$0" words "$@" && "$0" words "$@" --max-bytes 65536 --seed 2' "$trials" --transport auto "${beside[@]}" --json
    gpu_step 1 cpu-kills-small held 400 "$trials" kills "${beside[@]}" --json
    gpu_step 1 cpu-kills-large held 120 "$trials" kills "${beside[@]}" --large --kills 12 --json
    local overlap=("$pp" bench overlap "${p2p[@]}" "${beside[@]}" --json)
    for ((run = 1; run <= runs; run++)); do
        for ms in 5 1 0.5; do
            gpu_step 1 "cpu-overlap-${ms}ms-$run" optional 30 "${overlap[@]}" --simulate spin --decode-ms "$ms" --phase-b-ms "$ms"
        done
        for bytes in 4 22118400; do
            gpu_step 1 "cpu-behind-$bytes-$run" optional 30 "${overlap[@]}" --bytes "$bytes" "${behind[@]}"
        done
        gpu_step 1 "cpu-link-$run" optional 60 "$pp" bench link "${p2p[@]}" "${beside[@]}" --max-bytes 22118400 --json
    done
    for load in hbm gemm; do
        gpu_step 1 "cpu-cost-$load" optional 60 "${overlap[@]}" --simulate "$load" --decode-ms 0 --phase-b-ms 2 --against 4
    done
}

# Edges over the copy engine beside NCCL's, and the limit by hand.
p2p_edges() {
    # The tests of this name, of which there must be some.
    gpu_step 2 p2p-conformance held 150 env PP_TEST_GPU=real bash -o pipefail -c \
        '"$0" --test-threads=1 p2p | tee tests && grep -qE "ok\. [1-9]" tests' "$here/tests/conformance"
    p2p_pair p2p
    cpu_edges
    local run ms way load turn turns
    for ((run = 1; run <= runs; run++)); do
        for way in p2p nccl; do
            local overlap=("$pp" bench overlap --transport "$way" --json) name=p2p-overlap-$way
            for ms in 0.2 1 5 0; do
                gpu_step 2 "$name-22M-${ms}ms-$run" optional 30 "${overlap[@]}" "${spin[@]}" --decode-ms "$ms" --phase-b-ms "$ms"
            done
            gpu_step 2 "$name-64K-0ms-$run" optional 30 "${overlap[@]}" "${spin[@]}" --bytes 65536 --decode-ms 0 --phase-b-ms 0
            turns=1
            [[ $way == nccl ]] || turns=5
            for ((turn = 1; turn <= turns; turn++)); do
                # By turns with the loop by hand, since each takes a tenth longer at times.
                [[ $way == nccl || ! -x $work/p2p-limit ]] || gpu_step 2 "p2p-limit-$run-$turn" optional 30 "$work/p2p-limit" round_trip
                gpu_step 2 "$name-behind-$run-$turn" optional 30 "${overlap[@]}" "${spin[@]}" --bytes 4 "${behind[@]}"
            done
            gpu_step 2 "$name-chain-$run" optional 30 "${overlap[@]}" --simulate gemm --stages 5,5
            gpu_step 2 "p2p-link-$way-$run" optional 60 "$pp" bench link --transport "$way" --max-bytes 22118400 --json
            gpu_step 2 "p2p-link-large-$way-$run" optional 60 "$pp" bench link --transport "$way" --max-bytes $((1 << 30)) --json
        done
    done
    for load in hbm gemm; do
        for way in p2p nccl; do
            gpu_step 2 "p2p-overlap-$way-cost-$load" optional 60 "$pp" bench overlap --transport "$way" --json \
                --simulate "$load" --decode-ms 2 --phase-b-ms 2 --against 64
        done
    done
    # Two ranks on the only GPU once more, if any of these steps is wanted.
    if ((gpus < 2)) && [[ $(list=1; p2p_pair mps; mps_client) ]]; then
        [[ $list ]] || ((gpus == 0)) || start_mps
        p2p_pair mps
        mps_client
        end_mps
        hindrance=
    fi
    # The second one is a minimal program, which shows what the tool itself can check.
    local memcheck=("$sanitizer" --tool memcheck --target-processes all --error-exitcode 9)
    has "$sanitizer" p2p-memcheck held "$no_sanitizer" || return
    gpu_step 1 p2p-memcheck held 240 env PP_HEARTBEAT_MS=10000 "${memcheck[@]}" "$trials" words "${p2p[@]}" "${shared[@]}" \
        --messages 2000 --max-bytes 1000000 --json
    UNDER=${memcheck[*]} native_peer 2 p2p-memcheck-limit 120 "$here/peers/copy_engine.cu" -lcuda -lcublas
}

# A program of PyTorch.
torch_peer() { # GPUS NAME SECONDS ARGS...
    local need=$1 name=$2 limit=$3
    shift 3
    has "$torch" "$name" optional "needs python3 with torch and its CUDA" &&
        gpu_step "$need" "$name" optional "$limit" "$python" "$@"
}

# A program in C++, under another one where UNDER names it: then only the part that checks.
native_peer() { # GPUS NAME SECONDS FILE LIBRARIES...
    local need=$1 name=$2 limit=$3 made=$work/$2
    shift 3
    has "$nvcc" "$name" optional "needs nvcc" || return
    gpu_step "$need" "$name" optional "$limit" bash -c 'made=$1 && shift && "$0" -O2 -std=c++17 -arch=native -o "$made" "$@" &&
        exec ${UNDER:-} "$made" ${UNDER:+check}' "$nvcc" "$made" "$@"
}

# What else is to be run beside.
more_peers() {
    local file name
    for file in "$more"/*.cu "$more"/*.py; do
        name=more-$(basename "$file")
        case $file in
            */'*'.*) ;; # there is none
            *.cu) native_peer 2 "$name" 60 "$file" "${with_nccl[@]}" ;;
            *.py) torch_peer 2 "$name" 60 -m torch.distributed.run --standalone --nproc-per-node 2 "$file" ;;
        esac
    done
}

# The kernels at small sizes under NVIDIA's checker: reads and writes out of bounds, then races in shared memory.
sanitized() {
    local tool
    for tool in memcheck racecheck; do
        has "$sanitizer" "sanitizer-$tool" required "$no_sanitizer" &&
            gpu_step 1 "sanitizer-$tool" required 90 env PP_TEST_GPU=real "$sanitizer" --tool "$tool" --error-exitcode 9 \
                "$here/tests/gpu_oracle" --small encode decode zero rows phase_b film cache remember conditioning
    done
}

step device required 30 bash -c '(("$1")) || { echo "needs a GPU; nvidia-smi lists none, or is missing"; exit 1; }
    "$0" --query-gpu=index,name,memory.total,driver_version,clocks.max.sm,clocks.sm,power.limit --format=csv; "$0" topo -m || true' "${smi:-nvidia-smi}" "$gpus"
correctness
job
sanitized
benchmarks 1
native_peer 2 peer-limit 90 "$here/peers/nccl_limit.cu" "${with_nccl[@]}"
torch_peer 2 peer-pilot 75 "$here/peers/torch_pilot.py"
for ((again = 2; again <= runs; again++)); do benchmarks "$again"; done
once
faults
p2p_edges
# Last, since torch.compile takes as long as it likes.
torch_peer 1 peer-attention 200 "$here/peers/attention.py" --frames 4
[[ ! $more ]] || more_peers
[[ $list ]] && exit 0
[[ $stopped ]] || ((${#steps[@]})) || fail "--only $only names no step; --list shows their names"

# --- what came of it ------------------------------------------------------------------------------------------------

by_hand() { # BYTES MS FIELD: what the limit and the pilot give at one point
    local stage="${2/./\\.}0*(\.0+)?"
    local at="\"bytes\": ?$1, ?\"decode_ms\": ?$stage, ?\"phase_b_ms\": ?$stage,"
    figure "  the same by hand, all enqueued ahead" peer-limit "\"limit_pipeline\", ?$at" "$3"
    figure "  the same in PyTorch" peer-pilot "\"torch_pilot\", ?$at" "$3"
}
for entry in 0.2:0.95 1:0.985 5:0.99; do
    ms=${entry%:*}
    figure "efficiency, 22 MB, stages $ms ms" "overlap-22M-${ms}ms-" '' efficiency_asked min "${entry#*:}"
    figure "  over the mean period" "overlap-22M-${ms}ms-" '' efficiency_asked_by_mean
    by_hand 22118400 "$ms" efficiency
done
figure "ms a chunk, 22 MB, no work" overlap-22M-0ms- '' period_ms max 0.10
figure "  the mean" overlap-22M-0ms- '' period_mean_ms
by_hand 22118400 0 period_ms
figure "ms a chunk, 64 KiB, no work" overlap-64K-0ms- '' period_ms max 0.04
figure "  the mean" overlap-64K-0ms- '' period_mean_ms
by_hand 65536 0 period_ms
# NCCL by hand has no headers, checks and credits.
for entry in 22118400:link- 1073741824:large-link-; do
    bytes=${entry%:*} ours=${entry#*:}
    raw=(peer-limit "\"raw_nccl_one_way\",\"bytes\":$bytes," us)
    ratio "one way over raw NCCL, $bytes bytes, messages" "$ours" "\"bytes\":$bytes," one_way_us "${raw[@]}" max 1.0204
    ratio "  NCCL by hand from four buffers in turn" peer-limit "\"raw_nccl_one_way_in_turn\",\"bytes\":$bytes," us "${raw[@]}"
    ratio "  the same in PyTorch" peer-pilot "\"torch_one_way\", ?\"bytes\": ?$bytes," us "${raw[@]}"
done
raw=(peer-limit '"raw_nccl_round_trip_host","bytes":4,' us)
ratio "round trip over raw NCCL, 4 bytes, messages" link- '"bytes":4,' round_trip_us "${raw[@]}"
ratio "  the same in PyTorch" peer-pilot '"torch_round_trip_host", ?"bytes": ?4,' us "${raw[@]}"
figure "device memory taken between chunk 1,000 and 10,000" memory '' device_memory_grown_bytes max 0
for peer in sdpa offsets flex written_out; do
    ratio "a pass of attention over PyTorch ($peer)" kernels- '"name":"attend kernel, first pass"' median_us \
        peer-attention "\"peer\": ?\"$peer\", ?\"frames\": ?4," us max 1
done
for side in source sink; do
    figure "GB/s of the $side alone, 1280x720" video-720p "${side}_gbytes_per_s" median min 10
    figure "  the worst run" video-720p "${side}_gbytes_per_s" worst
done
for how in unwritten written restarts; do
    mark=(max 0.02)
    [[ $how == restarts ]] && mark=()
    figure "frames a second, 1280x720, $how" "720p-$how-" '' frames_per_second
    figure "  ms a chunk of 8" "720p-$how-" '' period_ms
    figure "  the mean" "720p-$how-" '' period_mean_ms
    figure "  share of the time that phase_b is idle" "720p-$how-" '"stage": ?"phase_b"' idle_share "${mark[@]}"
    figure "  ms from frame in to chunk out" "720p-$how-" '' latency_ms
    figure "  the 99th percentile" "720p-$how-" '' latency_p99_ms
done

figure "frames a second, 1280x720, one GPU" 720p-one- '' frames_per_second min 3700
figure "  ms a chunk of 8" 720p-one- '' period_ms
figure "  the mean" 720p-one- '' period_mean_ms
figure "frames a second, 1280x720, a part on each of two GPUs" 720p-parts- '' frames_per_second
figure "  ms a chunk of 8" 720p-parts- '' period_ms
figure "  the mean" 720p-parts- '' period_mean_ms
ratio "  over one GPU" 720p-parts- '' frames_per_second 720p-one- '' frames_per_second min 1.65
ratio "a group of two GPUs over one, 1920x1080, one pass" 1080p-group- '' frames_per_second 1080p-one- '' frames_per_second min 1.7
# Over the copy engine, over NCCL, and by hand: what it is, step, in which object, field, mark, object and field of the limit.
while IFS='|' read -r name at within field mark by_hand of_limit; do
    ways=(p2p nccl) before=${#rows[@]}
    [[ $at == *WAY* ]] || ways=('')
    for way in "${ways[@]}"; do
        read -ra marks <<<"${mark:-}"
        [[ $way != nccl ]] || marks=()
        figure "$name${way:+, $way}" "${at/WAY/$way}" "$within" "$field" "${marks[@]}"
    done
    [[ ! $by_hand ]] || ((${#rows[@]} == before)) || figure "  the same by hand" p2p-limit "\"copy_engine_$by_hand," "$of_limit"
done <<'TABLE'
efficiency, 22 MB, stages 0.2 ms|p2p-overlap-WAY-22M-0.2ms-||efficiency_asked|min 0.985|pipeline","bytes":22118400,"decode_ms":0.20|efficiency
efficiency, 22 MB, stages 1 ms|p2p-overlap-WAY-22M-1ms-||efficiency_asked|min 0.997|pipeline","bytes":22118400,"decode_ms":1.00|efficiency
efficiency, 22 MB, stages 5 ms|p2p-overlap-WAY-22M-5ms-||efficiency_asked|min 0.999|pipeline","bytes":22118400,"decode_ms":5.00|efficiency
ms a chunk, 22 MB, no work|p2p-overlap-WAY-22M-0ms-||period_ms|max 0.066|pipeline","bytes":22118400,"decode_ms":0.00|period_ms
ms a chunk, 64 KiB, no work|p2p-overlap-WAY-64K-0ms-||period_ms|max 0.010|pipeline","bytes":65536,"decode_ms":0.00|period_ms
us of a round trip, 4 bytes|p2p-link-WAY-|"bytes":4,|round_trip_us|max 18|round_trip","bytes":4,"behind_a_kernel":false|us
ms of a round trip, 4 bytes, behind a kernel|p2p-overlap-WAY-behind-||latency_ms||round_trip","bytes":4,"behind_a_kernel":true|ms
us of a message one way, 22 MB|p2p-link-WAY-|"bytes":22118400,|one_way_us|max 64|one_way","bytes":22118400,"buffers":4|us
GB/s one way, 1 GiB|p2p-link-large-WAY-|"bytes":1073741824,|one_way_gbytes_per_s|min 390|one_way","bytes":1073741824,"buffers":1|gbytes_per_s
us to issue a send, 22 MB|p2p-link-WAY-|"bytes":22118400,|send_us|max 5|issue","bytes":22118400,"stream":"held"|us
  the 99th percentile|p2p-link-WAY-|"bytes":22118400,|send_p99_us||issue","bytes":22118400,"stream":"held"|us_p99
2 ms of memory stream, 22 MB over 64 bytes|p2p-overlap-WAY-cost-hbm|"against":|ratio|max 1.01|cost","work":"hbm"|ratio
2 ms of products, 22 MB over 64 bytes|p2p-overlap-WAY-cost-gemm|"against":|ratio|max 1.01|cost","work":"gemm"|ratio
5 ms of products over the period of two in a row|p2p-overlap-WAY-chain-||efficiency|min 0.9901|chain"|efficiency
frames a second, 1280x720|p2p-film-WAY-||frames_per_second|||
efficiency, 22 MB, a CPU beside a GPU, stages 5 ms|cpu-overlap-5ms-||efficiency_asked|min 0.995|cpu_pipeline","bytes":22118400,"stage_ms":5|efficiency
  over the mean period|cpu-overlap-5ms-||efficiency_asked_by_mean||cpu_pipeline","bytes":22118400,"stage_ms":5|efficiency_by_mean
efficiency, 22 MB, a CPU beside a GPU, stages 1 ms|cpu-overlap-1ms-||efficiency_asked|min 0.99|cpu_pipeline","bytes":22118400,"stage_ms":1|efficiency
  over the mean period|cpu-overlap-1ms-||efficiency_asked_by_mean||cpu_pipeline","bytes":22118400,"stage_ms":1|efficiency_by_mean
efficiency, 22 MB, a CPU beside a GPU, stages 0.5 ms|cpu-overlap-0.5ms-||efficiency_asked|min 0.98|cpu_pipeline","bytes":22118400,"stage_ms":0.5|efficiency
  over the mean period|cpu-overlap-0.5ms-||efficiency_asked_by_mean||cpu_pipeline","bytes":22118400,"stage_ms":0.5|efficiency_by_mean
us of a message one way, 22 MB, CPU to GPU|cpu-link-|"bytes":22118400,|one_way_us||cpu_copy","bytes":22118400,"way":"in"|us
2 ms of memory stream, 22 MB over 4 bytes, beside a CPU|cpu-cost-hbm|"against":|ratio|max 1.01|cpu_cost","work":"hbm"|ratio
2 ms of products, 22 MB over 4 bytes, beside a CPU|cpu-cost-gemm|"against":|ratio||cpu_cost","work":"gemm"|ratio
TABLE
excess "  less that by hand" cpu-cost-gemm '"against":' ratio p2p-limit '"copy_engine_cpu_cost","work":"gemm",' ratio max 0.02
for entry in 4:2 22118400:1.1; do
    bytes=${entry%:*}
    trips "CPU, GPU, CPU, $bytes bytes" "cpu-behind-$bytes-" "${entry#*:}" p2p-limit "\"copy_engine_cpu_round_trip\",\"bytes\":$bytes,"
    for way in p2p mps; do
        trips "two ranks on one GPU, $bytes bytes, $way" "$way-behind-$bytes-" 1.5 \
            "$way-limit" "\"copy_engine_round_trip\",\"bytes\":$bytes,\"behind_a_kernel\":true,"
    done
done
ratio "a round trip behind a kernel over that by hand" p2p-overlap-p2p-behind- '' latency_ms \
    p2p-limit '"copy_engine_round_trip","bytes":4,"behind_a_kernel":true,' ms max 1.2
ratio "frames a second, 1280x720, p2p over nccl" p2p-film-p2p- '' frames_per_second p2p-film-nccl- '' frames_per_second min 1
for way in p2p mps; do
    with=
    [[ $way == p2p ]] || with=" under MPS"
    figure "wrong words of messages$with" $way-words '' wrong_words max 0
    for field in median_ms worst_ms; do
        figure "$field of a killed rank until its next result$with" $way-kills '"back_in_service":' "$field"
        figure "$field of the start of a bare rank$with" $way-kills '"bare_start":' "$field"
    done
    figure "ms that the former takes longer, median" $way-kills '' over_median_ms max 100
    figure "  worst, over the same median" $way-kills '' over_worst_ms max 150
done
figure "wrong words of messages between a CPU and a GPU" cpu-words '' wrong_words max 0
figure "ms that a rank killed beside a CPU is away longer than a bare start, median" cpu-kills-small '' over_median_ms max 120
figure "  worst, over the same median" cpu-kills-small '' over_worst_ms max 120
figure "the same with eight slots of 22,118,400 bytes, median" cpu-kills-large '' over_median_ms max 120
figure "  worst, over the same median" cpu-kills-large '' over_worst_ms max 200
ratio "frames a second with every tensor's digest over without" fault-verify-1 '' frames_per_second fault-verify-off '' frames_per_second

join() { local IFS=,; echo "$*"; }
about=null
[[ -s $here/about.json ]] && about=$(<"$here/about.json")
{
    printf '{"schema":1,"bundle":%s,"when":"%s","seconds":%d,"gpus":%d,"kernel":%s,"cpus":%d,\n' \
        "$about" "$(date -u +%FT%TZ)" "$SECONDS" "$gpus" "$(uname -sr | quote)" "$(getconf _NPROCESSORS_ONLN)"
    printf '"figures":[%s],\n"failed":[' "$(join "${figures[@]}")"
    for name in "${lost[@]}"; do printf '%s"%s"' "${comma:-}" "$name"; comma=,; done
    printf '],\n"steps":[\n'
    comma=
    for entry in "${steps[@]}"; do printf '%s%s' "$comma" "$entry"; comma=$',\n'; done
    printf '\n]}\n'
} >"$out.part" && mv "$out.part" "$out" || fail "cannot write $out"
if [[ $python ]] && ! "$python" -c 'import json, sys; json.load(open(sys.argv[1]))' "$out"; then
    echo "gpu-check: $out is no valid JSON" >&2
    lost+=(json)
fi

echo
if ((${#rows[@]})); then printf '%s\n' "${rows[@]}"; fi
echo "$SECONDS s; ${#steps[@]} steps; written to $out"
[[ ! $stopped ]] || exit "$stopped"
if ((${#lost[@]})); then
    printf 'failed: %s\n' "$(join "${lost[@]}")"
    exit 1
fi
