#!/bin/bash
# Only selected services preload the library: a single service, the instances of a template, and the
# services of a user's service manager.
. "$(dirname "$0")/../lib.sh"

units=/etc/systemd/system
# A script that reports its LD_PRELOAD, and whether the library is loaded.
cat >/usr/local/bin/nvshare-test-service <<'END'
#!/bin/sh
echo "${LD_PRELOAD:-nothing}, $(grep -c '/libnvshare\.so$' /proc/self/maps)" >"$1"
exec sleep 600
END
chmod 755 /usr/local/bin/nvshare-test-service
for name in test-service test-template@; do
    printf '[Service]\nExecStart=/usr/local/bin/nvshare-test-service /run/%%n\nEnvironment=LD_PRELOAD=/usr/lib/other.so\n' >$units/$name.service
done
cp /lib/*-linux-gnu/libresolv.so.2 /usr/lib/other.so
systemctl daemon-reload
library=$(echo /usr/lib/*-linux-gnu/libnvshare.so)
writes() { # unit, what
    systemctl restart "$1"
    until_true "$1 to say what it preloads" grep -qx "$2" "/run/$1"
}

refused "systemd has no unit no-such.service" nvsharectl preload enable --unit no-such
refused "sudo nvsharectl preload enable --unit test-service" as_user nvsharectl preload enable --unit test-service
systemctl start test-service.service
refused "sudo nvsharectl preload enable --unit test-service.service" nvsharectl preload enable --unit system.slice
nvsharectl preload enable --unit test-service >/dev/null || fail "enable ended with $?"
nvsharectl preload status --unit test-service | grep -q "restart test-service.service" || fail "it is not said that it must be restarted"
writes test-service.service "$library:/usr/lib/other.so, [1-9].*"
nvsharectl preload status --unit test-service >/tmp/said || fail "status ended with $?"
! grep problem /tmp/said || fail "there is a problem"
[ ! -e /etc/ld.so.preload ] || fail "every program preloads it"

nvsharectl preload enable --unit test-template@.service >/dev/null || fail "enable ended with $?"
writes test-template@a.service "$library:/usr/lib/other.so, [1-9].*"
nvsharectl preload status | grep -c '^  on for ' | grep -qx 2 || fail "status: $(nvsharectl preload status)"
for unit in test-service test-template@.service; do
    nvsharectl preload disable --unit $unit >/dev/null || fail "disable ended with $?"
done
writes test-service.service "/usr/lib/other.so, 0"
writes test-template@a.service "/usr/lib/other.so, 0"
systemctl stop test-service.service test-template@a.service

# A user's services have the variable LD_PRELOAD, because the user's service manager passes it on.
nvsharectl preload enable --user $user >/dev/null || fail "enable ended with $?"
systemctl start "user@$(id -u $user).service"
of_user() { runuser -u $user -- env XDG_RUNTIME_DIR="/run/user/$(id -u $user)" "$@"; }
mkdir -p "/home/$user/.config/systemd/user"
printf '[Service]\nExecStart=/usr/local/bin/nvshare-test-service %%t/said\n' >/home/$user/.config/systemd/user/test.service
chown -R $user: /home/$user/.config
of_user systemctl --user daemon-reload
of_user systemctl --user start test.service
until_true "a user's service to say what it preloads" grep -qx "$library, [1-9].*" "/run/user/$(id -u $user)/said"
nvsharectl preload disable --user $user >/dev/null || fail "disable ended with $?"
systemctl restart "user@$(id -u $user).service"
of_user systemctl --user start test.service
until_true "a user's service to say that it preloads nothing" grep -qx "nothing, 0" "/run/user/$(id -u $user)/said"
systemctl stop "user@$(id -u $user).service" "user-runtime-dir@$(id -u $user).service"

[ -z "$(find $units -name '*nvshare-preload*')" ] || fail "something is left: $(find $units -name '*nvshare-preload*')"
rm -r /home/$user/.config /usr/local/bin/nvshare-test-service $units/test-service.service $units/test-template@.service /usr/lib/other.so
rm -f /run/test-service.service /run/test-template@a.service
systemctl daemon-reload
