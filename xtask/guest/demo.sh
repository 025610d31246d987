#!/bin/bash
# The demo: our rping and the C rping ping each other in all useful pairs. Runs in the test machine or on a host with an
# RDMA device: demo.sh OUR-RPING ADDRESS, where ADDRESS belongs to the RDMA device that the servers listen on.
# Prints `pairs: GOOD of ALL` at the end; the status is 0 if all are good.
ours=$1 address=$2
pings=5 port=7180 good=0 all=0
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT

# The server is ready when the kernel shows its listening id. A kernel that does not show it to us: the client's connect
# fails then, and its status tells.
wait_for_server() {
	for _ in {1..200}; do
		rdma resource show cm_id 2>/dev/null | grep -q "LISTEN.*:$port " && return
		kill -0 "$1" 2>/dev/null || return
		sleep 0.05
	done
}

pair() {
	local title=$1 server=$2 client=$3 server_status client_status verified
	all=$((all + 1)) port=$((port + 1))
	echo
	echo "--- $all. $title"
	echo "\$ ${server#"$PWD"/} -s -a $address -p $port -C $pings -V &"
	timeout 60 "$server" -s -a "$address" -p $port -C $pings -V >"$log/server" 2>&1 &
	local process=$!
	wait_for_server $process
	echo "\$ ${client#"$PWD"/} -c -a $address -p $port -C $pings -v -V"
	timeout 60 "$client" -c -a "$address" -p $port -C $pings -v -V >"$log/client" 2>&1
	client_status=$?
	[[ $client_status == 0 ]] || kill $process 2>/dev/null
	wait $process
	server_status=$?
	verified=$(grep -c '^ping data' "$log/client")
	grep '^ping data' "$log/client" | cut -c1-60 | sed 's/^/    /'
	if [[ $client_status == 0 && $server_status == 0 && $verified == "$pings" ]]; then
		echo "    $verified pings went there and back unchanged"
		good=$((good + 1))
	else
		echo "    FAILED: the server ended with $server_status, the client with $client_status; $verified of $pings pings"
		sed 's/^/    server: /' "$log/server"
		sed 's/^/    client: /' "$log/client"
	fi
}

c=$(command -v rping) || {
	echo "the C rping is not here: it is in Debian's package rdmacm-utils" >&2
	exit 1
}
pair "our server, our client" "$ours" "$ours"
pair "C server, our client" "$c" "$ours"
pair "our server, C client" "$ours" "$c"
echo
echo "pairs: $good of $all"
[[ $good == "$all" ]]
