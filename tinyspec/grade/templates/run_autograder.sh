#!/usr/bin/env bash
# Run for every submission: the final run on /autograder/submission, its verdict into /autograder/results/results.json.
root="${AUTOGRADER:-/autograder}"
python="${PYTHON:-$root/venv/bin/python}"
results="$root/results/results.json"
mkdir -p "$root/results"
rm -f "$results" # of an earlier submission: a grader that fails must not keep its score
cd "$root/source" || exit 1
export TINYSPEC_PURE=1 # nothing is compiled here
"$python" -m tinyspec grade {name} "$root/submission"{tasks} --final --seed {seed} --quiet --gradescope "$results"
if [ ! -s "$results" ]; then
    echo '{"score": 0, "output": "The grader itself failed. Please tell the staff."}' > "$results"
fi
