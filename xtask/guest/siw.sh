# Soft-iWARP in the test machine (started with --siw). Source it as root in the guest:  . "$RDMACM_GUEST_LIB/siw.sh"
#
# siw_load             load the siw module
# siw_add NAME NETDEV  make a siw device on a network device
#
# rxe and siw can sit on the same network device, and a program then uses one of them without asking: give siw a
# network device of its own. Unlike rxe, siw works in any network namespace.
siw_load() {
	local module
	[[ -e /run/mods/siw.ko ]] || {
		echo "siw_load: there is no siw.ko: start the test machine with --siw" >&2
		return 1
	}
	for module in $(cat /run/mods/siw.list); do
		grep -q "^$(basename "${module//-/_}" .ko) " /proc/modules || insmod "/run/mods/$module" || return 1
	done
}

siw_add() {
	rdma link add "$1" type siw netdev "$2"
}
