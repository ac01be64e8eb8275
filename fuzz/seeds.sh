#!/bin/sh
# Makes the seed corpus from the golden bytes: fuzz/corpus/TARGET/NAME, from tests/data/NAME.hex.
set -eu
cd "$(dirname "$0")"
seed() {
    mkdir -p "corpus/$1"
    sed 's/#.*//' "../crates/pp-contract/tests/data/$2.hex" | xxd -r -p > "corpus/$1/$2"
}
for name in noop shutdown infer_envelope infer_result error_failure; do
    seed frame "$name"
done
seed hello hello
seed fault fault
