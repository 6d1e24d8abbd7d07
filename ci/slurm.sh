#!/usr/bin/env bash
# The gate as a Slurm array, a shard a task, and a last job that joins the reports:
#
#   bash ci/slurm.sh 4 [--partition gpu --gres gpu:8 ...]
#
# The first argument is the number of shards, the rest goes to every sbatch of the array. Run it in
# the root of a checkout that all nodes see, in an environment that has kdtree-engine[cu13].
set -euo pipefail
shards=${1:?usage: ci/slurm.sh SHARDS [sbatch options]}
shift
out=report/shards
rm -rf "$out" && mkdir -p "$out"
array=$(sbatch --parsable --job-name kdtr-gate --array "1-$shards" --output "$out/%a.log" "$@" \
  --wrap "kdtr gate --device cuda --shard \$SLURM_ARRAY_TASK_ID/$shards --report $out/\$SLURM_ARRAY_TASK_ID")
# afterany: a shard that failed must be seen in the merged report, and not only in the queue.
sbatch --job-name kdtr-merge --dependency "afterany:${array%%;*}" --output "$out/merge.log" \
  --wrap "kdtr report merge $out/*/report.json"
