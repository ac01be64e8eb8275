#!/bin/sh
# Makes the seed corpus: fuzz/corpus/TARGET/NAME, from seeds/TARGET/NAME.hex and, for the targets of
# pp-contract, from its golden bytes. Hexadecimal, with comments.
set -eu
cd "$(dirname "$0")"
seed() {
    mkdir -p "corpus/$1"
    sed 's/#.*//' "$2" | xxd -r -p > "corpus/$1/$(basename "$2" .hex)"
}
golden=../crates/pp-contract/tests/data
for name in noop shutdown infer_envelope infer_result error_failure; do
    seed frame "$golden/$name.hex"
done
seed hello "$golden/hello.hex"
seed fault "$golden/fault.hex"
for file in seeds/*/*.hex; do
    seed "$(basename "$(dirname "$file")")" "$file"
done
