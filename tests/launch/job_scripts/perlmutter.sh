#!/bin/bash
#SBATCH --job-name=demo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --exclusive
#SBATCH --time=06:00:00
#SBATCH --licenses=scratch,cfs
#SBATCH --qos=regular
#SBATCH --constraint=gpu
#SBATCH --gpus-per-node=4
#SBATCH --account=m1234
#SBATCH --output=runs/demo/logs/job-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@510
# Written by: polarlm submit run.yaml --nodes 2 --walltime 06:00:00 --queue regular --account m1234 --until-done --dry-run

began=$(date +%s)
fail() { echo "error: $1 on $HOSTNAME" >&2; exit 2; }
cd /work/me || fail "this job's folder is not there"

# The modules that the site perlmutter wants; none was loaded where this was submitted.
type module > /dev/null 2>&1 || source /opt/cray/pe/lmod/lmod/init/bash
type module > /dev/null 2>&1 || fail 'there is no module command'
for module_name in pytorch; do
    # Many a `module load` that fails says so and ends well.
    module load "$module_name" && [[ ":$LOADEDMODULES:" == *":$module_name"[:/]* ]] ||
        fail "module $module_name cannot be loaded"
done

# The Python that submitted this, before any that a module brings.
python=/home/me/venv/bin/python
[[ -x $python ]] || fail "there is no $python (is its file system there?)"
export PATH="${python%/*}:$PATH"
echo "python: $python on $HOSTNAME"

# Set there, and not written down: WANDB_API_KEY

# Trains on every node; tells the run to save before the walltime ends, and keeps jobs.jsonl.
exec "$python" -m polarlm.launch.job runs/demo --scheduler slurm --nodes 2 \
    --walltime-s 21600 --began "$began" --until-done runs/demo/job.sh -- \
    "$python" -m polarlm train runs/demo --resume --nodes 2
