#!/bin/bash
# A user keeps memory free while games run, through a unit of the user's service manager. GameMode
# is the real program.
. "$(dirname "$0")/../lib.sh"

service=nvshare-games.service
trap '[ $? = 0 ] || journalctl --no-pager -o short-monotonic -n 40 "_UID=$(id -u $user)" >&2' EXIT
systemctl start "user@$(id -u $user).service"
[ "$(in_session systemctl --user is-enabled $service)" = disabled ] || fail "$service is enabled by itself"
[ "$(in_session systemctl --user is-active $service)" = inactive ] || fail "$service runs by itself"

# Users of an active local session may make rooms. This user has no such session, so a polkit rule
# lets the user make rooms.
rules=/etc/polkit-1/rules.d/10-test.rules
printf 'polkit.addRule(function(action, subject) {\n    if (action.id == "org.nvshare.Scheduler1.make-room" && subject.user == "%s")\n        return polkit.Result.YES;\n});\n' $user >$rules
chmod 644 $rules
# The GPU is too small for 8 GiB. The unit's file describes this way to change the size.
mkdir -p /home/$user/.config/systemd/user/$service.d
printf '[Service]\nExecStart=\nExecStart=/usr/bin/nvsharectl make-room --games 64M\n' >/home/$user/.config/systemd/user/$service.d/override.conf
chown -R $user: /home/$user/.config
in_session systemctl --user daemon-reload
in_session systemctl --user enable --quiet --now $service || fail "$service: $(in_session systemctl --user status $service 2>&1)"
until_true "$service to run" in_session systemctl --user is-active $service

keeps() { is_so "[.gpus[].kept // 0] | add == $1"; }
keeps 0 >/dev/null || fail "memory is kept free without a game: $(nvsharectl)"
gamemode() { in_session busctl --user call com.feralinteractive.GameMode /com/feralinteractive/GameMode com.feralinteractive.GameMode "$@"; }
as_user sleep 600 2>/dev/null &
until_true "the game to run" pgrep -x -u $user sleep
game=$(pgrep -x -u $user sleep)
gamemode RegisterGame i "$game" >/dev/null || fail "GameMode does not take a game"
until_true "memory to be kept free for a game" keeps $((64 << 20))
is_so ".gpus[].rooms[] | .uid == $(id -u $user)" >/dev/null || fail "whose room it is: $(nvsharectl)"
gamemode UnregisterGame i "$game" >/dev/null || fail "GameMode does not let a game go"
until_true "the memory to be given back" keeps 0
kill "$game"
wait || true

in_session systemctl --user disable --quiet --now $service
[ "$(in_session systemctl --user is-active $service)" = inactive ] || fail "$service runs on"
systemctl stop "user@$(id -u $user).service" "user-runtime-dir@$(id -u $user).service"
rm -r /home/$user/.config $rules
