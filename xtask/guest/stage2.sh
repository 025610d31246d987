#!/bin/bash
# Second program of the test machine, as process 1 on the host's own files. It brings the two RDMA devices up, runs the
# command, and leaves its results in /run/vm, which is the folder that the host reads:
#   environment, command, folder   what to run, written by the host
#   status                         the command's exit status; missing when the guest died
#   dmesg                          the kernel's log, in which the host looks for warnings
# /dev/ttyS0 is the console (kernel messages), /dev/ttyS1 carries the command's output.
hostname test-machine
ip link set lo up
ulimit -l unlimited
ulimit -n 1048576
exec 4<>/dev/ttyS1 # kept open: the settings of a serial line end with its last user
stty raw -echo <&4

set -a
. /run/vm/environment
set +a

# Shortly before the host's patience ends: what every program waits for, on the console, which the host then shows.
last_words() {
	local process arguments
	sleep "$LAST_WORDS_AFTER"
	echo "The time is nearly over. Programs, and what each of their threads waits for in the kernel:"
	for process in /proc/[0-9]*; do
		arguments=$(tr '\0' ' ' <"$process/cmdline")
		[[ -n $arguments && $process != /proc/1 ]] || continue # kernel threads have no arguments
		echo "${process#/proc/} $arguments"
		grep -h -m 4 . "$process"/task/*/stack | sed 's/^/    /'
	done
} >/dev/ttyS0 2>/dev/null
last_words &

# The command writes to a pipe, not to the serial line itself: programs that see a terminal draw progress bars.
exec 3> >(exec cat >/dev/ttyS1 4<&-)
writer=$!
status=250
if . "$RDMACM_GUEST_LIB/pair.sh" && pair_up >&3 2>&1; then
	cd "$(cat /run/vm/folder)" && bash /run/vm/command </dev/null >&3 2>&1 3>&- 4>&-
	status=$?
else
	echo "test machine: the pair of RDMA devices did not come up" >&3
fi

# The writer ends when the last program with the pipe has ended and the line is drained. A program that the command
# left in the background must not keep the machine up.
exec 3>&-
for _ in {1..40}; do
	kill -0 "$writer" 2>/dev/null || break
	sleep 0.05
done
dmesg >/run/vm/dmesg
echo "$status" >/run/vm/status
sync -f /run/vm
printf '\x00' | dd of=/dev/port bs=1 seek=244 count=1 2>/dev/null # isa-debug-exit: qemu ends at once
busybox reboot -f
