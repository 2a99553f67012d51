#!/bin/bash
#PBS -N demo
#PBS -l select=2
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -l filesystems=home:eagle
#PBS -q debug
#PBS -A datascience
#PBS -r y
#PBS -j oe
#PBS -k doe
#PBS -o runs/demo/logs/
# Written by: polarlm submit run.yaml --nodes 2 --walltime 01:00:00 --queue debug --account datascience --dry-run

began=$(date +%s)
fail() { echo "error: $1 on $HOSTNAME" >&2; exit 2; }
cd /work/me || fail "this job's folder is not there"

# The modules that were loaded where this was submitted.
type module > /dev/null 2>&1 || source /opt/cray/pe/lmod/lmod/init/bash
type module > /dev/null 2>&1 || fail 'there is no module command'
module use --append /soft/modulefiles
for module_name in craype-x86-milan PrgEnv-nvidia/8.5.0 conda/2024-10-30-workshop; do
    # Many a `module load` that fails says so and ends well.
    module load "$module_name" && [[ ":$LOADEDMODULES:" == *":$module_name"[:/]* ]] ||
        fail "module $module_name cannot be loaded"
done

# The Python that submitted this, before any that a module brings.
export VIRTUAL_ENV=/home/me/venv
python=/home/me/venv/bin/python
[[ -x $python ]] || fail "there is no $python (is its file system there?)"
export PATH="${python%/*}:$PATH"
echo "python: $python on $HOSTNAME"

# Variables that were set where this was submitted.
export NCCL_ALGO=Ring,Tree
# In the run's config.yaml already.
unset MPSIZE SP_TYPE

# Trains on every node; tells the run to save before the walltime ends, and keeps jobs.jsonl.
exec "$python" -m polarlm.launch.job runs/demo --scheduler pbs --nodes 2 \
    --walltime-s 3600 --began "$began" -- \
    "$python" -m polarlm train runs/demo --resume --nodes 2
