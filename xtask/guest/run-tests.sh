#!/bin/bash
# Runs test binaries in the test machine, one after the other: run-tests.sh THREADS FILTER BINARY...
# All of them run, and the status says whether one failed. --show-output lets the host see the `SKIP:` lines of tests that
# passed without doing anything.
threads=$1 filter=$2
shift 2
status=0
for binary in "$@"; do
	echo
	echo "     Running $(basename "$binary")"
	"$binary" --test-threads="$threads" --show-output ${filter:+"$filter"} || status=1
done
exit $status
