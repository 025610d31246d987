# The two RDMA devices of the test machine. Source it as root in the guest:  . "$RDMACM_GUEST_LIB/pair.sh"
#
#   rxe0 = v0 = 10.77.0.1 = fd77::1        rxe1 = v1 = 10.77.0.2 = fd77::2        (and fe80:: addresses on both)
#
# Both ends of one veth pair are in the initial network namespace, because rxe of Linux 6.1 and 6.12 sends and receives
# nowhere else. Policy routing makes packets between the two addresses cross the veth instead of looping back, so the
# link can be cut or slowed.
#
# pair_up              make everything; PAIR_MTU (default 4200: RDMA MTU 4096) and PAIR_NETEM=0 (no netem) change it
# pair_down            undo it
# pair_netem v0 ARGS   change the netem settings of one direction, e.g. pair_netem v0 loss 5%; without ARGS: none
# pair_link v0 down    take one end down; `up` brings it back and makes its rxe device anew
# pair_routes, pair_wait   parts of the above

# Routes and neighbours; needed again after a link was down, since routes vanish with it. The permanent neighbours
# spare the first packet an ARP exchange, which would cost 2 s if it is lost.
pair_routes() {
	local mac0 mac1
	read -r mac0 </sys/class/net/v0/address
	read -r mac1 </sys/class/net/v1/address
	ip -4 -batch - <<-END
		route replace 10.77.0.2 dev v0 src 10.77.0.1 table 101
		route replace 10.77.0.1 dev v1 src 10.77.0.2 table 102
	END
	ip -6 -batch - <<-END
		route replace fd77::2 dev v0 src fd77::1 table 101
		route replace fd77::1 dev v1 src fd77::2 table 102
	END
	ip -batch - <<-END
		neigh replace 10.77.0.2 lladdr $mac1 dev v0 nud permanent
		neigh replace 10.77.0.1 lladdr $mac0 dev v1 nud permanent
		neigh replace fd77::2 lladdr $mac1 dev v0 nud permanent
		neigh replace fd77::1 lladdr $mac0 dev v1 nud permanent
	END
}

# Waits until both links and both RDMA ports are up.
pair_wait() {
	local state0 state1 port0 port1
	for _ in {1..100}; do
		read -r state0 </sys/class/net/v0/operstate
		read -r state1 </sys/class/net/v1/operstate
		read -r port0 </sys/class/infiniband/rxe0/ports/1/state
		read -r port1 </sys/class/infiniband/rxe1/ports/1/state
		[[ $state0$state1 == upup && $port0 == *ACTIVE* && $port1 == *ACTIVE* ]] && return 0
		sleep 0.05
	done
	echo "pair_wait: the links or ports are not up after 5 s: $state0 $state1 $port0 $port1" >&2
	return 1
}

pair_up() {
	local link mtu=${PAIR_MTU:-4200}
	ip link add v0 type veth peer name v1
	for link in v0 v1; do
		echo 0 >/proc/sys/net/ipv6/conf/$link/accept_dad # addresses are usable at once
		echo 1 >/proc/sys/net/ipv6/conf/$link/keep_addr_on_down
	done
	for link in all v0 v1; do
		echo 1 >/proc/sys/net/ipv4/conf/$link/accept_local
		echo 0 >/proc/sys/net/ipv4/conf/$link/rp_filter
	done
	ip -batch - <<-END
		link set v0 mtu $mtu up
		link set v1 mtu $mtu up
		addr add 10.77.0.1/24 dev v0
		addr add 10.77.0.2/24 dev v1
		addr add fd77::1/64 dev v0 nodad
		addr add fd77::2/64 dev v1 nodad
	END
	# The kernel looks at the local table first; move it behind the two rules that send traffic through the veth.
	ip -4 -batch - <<-END
		rule add pref 100 lookup local
		rule del pref 0
		rule add pref 10 iif lo to 10.77.0.2 lookup 101
		rule add pref 11 iif lo to 10.77.0.1 lookup 102
	END
	# Not `iif lo` here: rdma_cm's validate_ipv6_net_dev looks routes up without an incoming device, and refuses the
	# connection if it does not find the veth.
	ip -6 -batch - <<-END
		rule add pref 100 lookup local
		rule del pref 0
		rule add pref 5 iif v0 lookup local
		rule add pref 6 iif v1 lookup local
		rule add pref 10 to fd77::2 lookup 101
		rule add pref 11 to fd77::1 lookup 102
	END
	# netem is there from the start: changing it later disturbs nothing, while putting it in place drops what is in flight.
	if [[ ${PAIR_NETEM:-1} == 1 ]]; then
		tc qdisc add dev v0 root netem limit 100000
		tc qdisc add dev v1 root netem limit 100000
	fi
	pair_routes
	rdma link add rxe0 type rxe netdev v0
	rdma link add rxe1 type rxe netdev v1
	pair_wait
}

pair_down() {
	local family pref
	rdma link del rxe0
	rdma link del rxe1
	ip link del v0
	for family in -4 -6; do
		for pref in 5 6 10 11; do
			ip $family rule del pref $pref 2>/dev/null
		done
		ip $family rule add pref 0 lookup local
		ip $family rule del pref 100
	done
}

pair_netem() {
	local link=$1
	shift
	tc qdisc change dev "$link" root netem limit 100000 "$@"
}

# After `up` the rxe device is made anew: its QP1 is dead if a CM message was sent while the link was down.
pair_link() {
	local link=$1 state=$2 device=rxe${1#v}
	ip link set "$link" "$state"
	[[ $state == up ]] || return 0
	pair_wait
	pair_routes
	rdma link del "$device"
	rdma link add "$device" type rxe netdev "$link"
	pair_wait
}
