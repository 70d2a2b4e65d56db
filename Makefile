# `make help` lists the targets. Cargo builds everything. This file defines the order of the steps,
# the required tools, and the installed paths.

CARGO ?= cargo
# Programs for Kubernetes nodes only. Building them takes long.
KUBERNETES_CRATES = nvshare-device-plugin nvshare-agent
# The prerequisites of checks. tests/check.sh sets this variable to nothing, because it has already
# built the programs.
PROGRAMS ?= programs

TARGET = $(or $(CARGO_TARGET_DIR),target)
BUILT = $(TARGET)/debug
QUICK = $(TARGET)/quick
COMPLETIONS = $(TARGET)/release/completions

# nvsharectl is linked statically, so that it can disable preloading when no other program starts.
STATIC ?= -C target-feature=+crt-static

# The installed paths, below $(DESTDIR).
prefix ?= /usr
bindir ?= $(prefix)/bin
libexecdir ?= $(prefix)/libexec
# Debian's loader searches a directory per architecture. Other distributions use lib64 or lib.
multiarch = $(shell $(CC) -print-multiarch 2>/dev/null)
libdir ?= $(prefix)/lib$(if $(multiarch),/$(multiarch),$(if $(wildcard /usr/lib64/libc.so*),64))
unitdir ?= $(prefix)/lib/systemd/system
userunitdir ?= $(prefix)/lib/systemd/user
mandir ?= $(prefix)/share/man
sysconfdir ?= /etc
# Cockpit finds pages in share/cockpit below each of XDG_DATA_DIRS.
cockpitdir ?= $(prefix)/share/cockpit/nvshare
# The shells' directories of completions. Debian's zsh uses vendor-completions.
bashdir ?= $(prefix)/share/bash-completion/completions
zshdir ?= $(prefix)/share/zsh/site-functions
fishdir ?= $(prefix)/share/fish/vendor_completions.d
# Man pages of programs that are only in the Kubernetes image.
IN_IMAGE = man/nvshare-device-plugin.8 man/nvshare-agent.8
# The output directory of deb.
PACKAGES ?= $(abspath $(TARGET))/packages
# The name of dist's tarball, and of the folder in it.
DIST = nvshare-$(shell sed -n '/^\[workspace.package\]/,/^$$/s/^version = "\(.*\)"/\1/p' Cargo.toml)
# The output directory of apt-repository.
REPOSITORY ?= $(abspath $(TARGET))/repository

.PHONY: help build quick artifacts programs demo-programs demo check check-system check-containers check-kubernetes check-arm64 check-compatibility figures-cpu card install uninstall deb apt-repository dist clean

help:
	@echo 'make build                builds release binaries, libnvshare.so and shell completions in $(TARGET)/release'
	@echo 'make build STATIC=        the same, with nvsharectl linked dynamically (without a static C library)'
	@echo 'make quick                builds the same in $(TARGET)/quick, hardly optimized, in a fraction of the time'
	@echo 'make demo                 runs two programs that share a simulated GPU that is too small for both'
	@echo 'make demo GPU=real        the same on the first GPU; DEMO_LEAVE=16G leaves only 16 GiB of it free'
	@echo 'make check                checks formatting and lints, and runs all tests and the demo, without a GPU'
	@echo 'make check-system         installs the packages on booted Debian 12 and 13, then runs demo and check in fresh'
	@echo '                          containers (root); FRESH=demo skips that check, FRESH=no both'
	@echo 'make check-containers     runs containers of Debian 11 and 12 under podman (root)'
	@echo 'make check-kubernetes     runs pods on a Kubernetes node that it builds (root)'
	@echo '                          KUBERNETES=DIR uses the kubelet and other programs of a release'
	@echo 'make check-arm64          runs programs for aarch64, emulated by qemu-user (root, Debian)'
	@echo 'make check-compatibility  runs the library of FROM=TAG with this scheduler, and the reverse'
	@echo 'make figures-cpu          measures all figures that need no GPU; PARTS="guest exposure" only some'
	@echo 'make card                 builds the programs for bench/gpu/all.py in $(TARGET)/card'
	@echo 'make install              installs programs, library, units, policies, man pages and the page for Cockpit'
	@echo '                          below $$DESTDIR$(prefix)'
	@echo 'make uninstall            removes what install has installed, except settings'
	@echo 'make deb                  builds Debian packages in $(TARGET)/packages; VERSION=0.1.1~test sets their version'
	@echo 'make apt-repository       makes a signed apt repository of them in $(TARGET)/repository; KEY=ID is the gpg key'
	@echo '                          (default: a new key for tests), URL=URL is where hosts find the repository'
	@echo 'make dist                 makes a source tarball with all crates in $(TARGET)/dist'
	@echo 'make clean                removes all build results'
	@echo
	@echo 'Fast loops:'
	@echo '  cargo nextest run -p nvshare-wire                      one crate'
	@echo '  cargo nextest run -p nvshare-sched -p scheduler-tests  the scheduler, in virtual time'
	@echo '  make artifacts && cargo nextest run                    end to end'
	@echo '  cd preload && cargo nextest run                        the library, a workspace of its own'

build:
	@tests/needs.sh cargo cc $(if $(STATIC),libc.a)
	$(CARGO) build --release --locked -p nvshare --bin nvshare-scheduler
	$(CARGO) build --release --locked -p nvshare-checkpoint -p nvshare-hibernate
	$(CARGO) rustc --release --locked -p nvshare --bin nvsharectl -- $(STATIC)
	$(CARGO) run --release --locked -p nvshare-completions -- $(COMPLETIONS)
	$(CARGO) build --release --locked --manifest-path preload/Cargo.toml

# Builds no shell completions, and links nvsharectl dynamically.
quick:
	@tests/needs.sh cargo cc
	$(CARGO) build --locked --profile quick -p nvshare -p nvshare-checkpoint -p nvshare-hibernate
	$(CARGO) build --locked --profile quick --manifest-path preload/Cargo.toml

# Builds the programs that tests start.
artifacts: programs
	@tests/needs.sh libc.a
	tests/static-nvsharectl.sh $(BUILT)

# The programs that one run of cargo builds.
programs:
	@tests/needs.sh cargo cc
	$(CARGO) build --workspace $(addprefix --exclude ,$(KUBERNETES_CRATES)) --locked
	$(CARGO) build --locked --manifest-path preload/Cargo.toml

# On a simulated GPU, the demo needs no optional features and no optimization.
demo-programs:
	@tests/needs.sh cargo cc
ifeq ($(GPU),real)
	$(CARGO) build --locked --profile quick -p nvshare -p nvshare-checkpoint -p nvshare-demo -p cuda-programs
	$(CARGO) build --locked --profile quick --manifest-path preload/Cargo.toml
else
	$(CARGO) build --locked --profile quick --no-default-features -p nvshare -p nvshare-demo -p cuda-programs -p cuda-sim -p nvml-sim
	$(CARGO) build --locked --profile quick --config profile.quick.opt-level=0 --manifest-path preload/Cargo.toml
endif

demo: demo-programs
ifeq ($(GPU),real)
	@$(QUICK)/nvshare-demo --real
else
	@tests/cuda-sim/install.sh $(QUICK)/simulated $(QUICK)
	@$(QUICK)/nvshare-demo --simulated $(QUICK)/simulated
endif

check:
	@CARGO='$(CARGO)' tests/check.sh

# Hibernations that are interrupted at random moments: few in `make check`, which sets FRESH=no.
HIBERNATIONS ?= $(if $(FRESH),20,500)

# The old and the new version contain the same programs, because dpkg and systemd perform the steps
# of an upgrade.
check-system: $(PROGRAMS)
	@tests/needs.sh mmdebstrap systemd-nspawn apt-ftparchive gpg
	rm -rf $(TARGET)/system/packages
	$(MAKE) deb PACKAGES='$(abspath $(TARGET))/system/packages'
	$(MAKE) deb PACKAGES='$(abspath $(TARGET))/system/packages' VERSION=999~test
	HIBERNATIONS='$(HIBERNATIONS)' tests/system/check.sh $(BUILT) $(TARGET)/system/packages
	for suite in $(or $(SUITES),bookworm trixie); do FRESH='$(FRESH)' tests/system/fresh.sh $$suite || exit; done

check-containers: artifacts
	@tests/needs.sh podman crun mmdebstrap musl-gcc python3
	$(CARGO) build --workspace --locked
	CARGO='$(CARGO)' tests/containers/check.sh $(BUILT)

check-kubernetes: artifacts
	@tests/needs.sh mmdebstrap cc libc.a readelf ip
	$(CARGO) build --workspace --locked
	tests/kubernetes/check.sh $(BUILT) $(if $(KUBERNETES),'$(KUBERNETES)')
	PATH='$(abspath $(TARGET))/kubernetes/tools':"$$PATH" $(CARGO) test --locked -p nvshare-agent --test agent -- --include-ignored helm manifests

check-arm64: artifacts
	@tests/needs.sh mmdebstrap
	CARGO='$(CARGO)' tests/arm64/check.sh $(BUILT)

check-compatibility: programs
	@[ -n '$(FROM)' ] || { echo 'Which version? make check-compatibility FROM=v0.1.0' >&2; exit 1; }
	CARGO='$(CARGO)' tests/compatibility.sh '$(FROM)' $(BUILT)

figures-cpu:
	@tests/needs.sh cargo cc
	CARGO='$(CARGO)' bench/cpu.sh $(PARTS)

card:
	@tests/needs.sh cargo cc
	@# One run: a second one for the benchmarks would build the programs again, with the features of dev-dependencies.
	@# The crates that benchmarks use are built twice in any case, because cargo builds them with panic=unwind.
	$(CARGO) build --release --locked -p nvshare -p nvshare-checkpoint -p nvshare-hibernate -p cuda-programs --bins --bench exchange --bench mix
	$(CARGO) build --release --locked --manifest-path preload/Cargo.toml
	rm -rf $(TARGET)/card
	mkdir $(TARGET)/card
	cd $(TARGET)/release && cp nvshare-scheduler nvsharectl nvshare-checkpoint nvshare-hibernate cuda-program libnvshare.so ../card
	for bench in exchange mix; do \
	    cp "$$(ls -t $(TARGET)/release/deps/$$bench-* | grep -v '\.d$$' | head -n 1)" $(TARGET)/card/$$bench || exit; done

# This target does not use cargo, so that root need not have cargo. Run `make build` first.
install:
	@[ -e $(TARGET)/release/libnvshare.so ] || { echo 'Nothing is built yet: make build' >&2; exit 1; }
	install -d $(addprefix $(DESTDIR),$(bindir) $(libexecdir) $(libdir) $(unitdir) $(userunitdir) $(sysconfdir)/nvshare)
	install -m 755 $(TARGET)/release/nvshare-scheduler $(TARGET)/release/nvsharectl $(DESTDIR)$(bindir)
	install -m 755 $(TARGET)/release/nvshare-checkpoint $(TARGET)/release/nvshare-hibernate $(DESTDIR)$(libexecdir)
	@# In one step: where every program loads it, one that loads half of it dies.
	install -m 644 $(TARGET)/release/libnvshare.so $(DESTDIR)$(libdir)/libnvshare.so.new
	mv -f $(DESTDIR)$(libdir)/libnvshare.so.new $(DESTDIR)$(libdir)/libnvshare.so
	@# Settings that somebody has changed stay.
	[ -e $(DESTDIR)$(sysconfdir)/nvshare/nvshare.toml ] || install -m 644 etc/nvshare.toml $(DESTDIR)$(sysconfdir)/nvshare
	install -m 644 $(wildcard systemd/*.service systemd/*.socket systemd/*.path) $(DESTDIR)$(unitdir)
	install -m 644 systemd/user/nvshare-games.service $(DESTDIR)$(userunitdir)
	sed -i 's|=/usr/bin/nv|=$(bindir)/nv|' $(addprefix $(DESTDIR)$(unitdir)/,nvshare.service nvshare-cdi.service nvshare-boot.service) \
	    $(DESTDIR)$(userunitdir)/nvshare-games.service
	sed -i 's|/usr/libexec/|$(libexecdir)/|' $(DESTDIR)$(unitdir)/nvshare-checkpoint@.service \
	    $(DESTDIR)$(unitdir)/nvshare-hibernate@.service
	install -Dm 644 $(COMPLETIONS)/nvsharectl.bash $(DESTDIR)$(bashdir)/nvsharectl
	install -Dm 644 -t $(DESTDIR)$(zshdir) $(COMPLETIONS)/_nvsharectl
	install -Dm 644 -t $(DESTDIR)$(fishdir) $(COMPLETIONS)/nvsharectl.fish
	@# What containers have as /etc/ld.so.preload. The loader knows no comments there.
	install -Dm 644 -t $(DESTDIR)$(prefix)/share/nvshare etc/ld.so.preload
	install -Dm 644 etc/apparmor-abstraction $(DESTDIR)$(sysconfdir)/apparmor.d/abstractions/nvshare
	install -Dm 644 systemd/nvshare.sysusers $(DESTDIR)$(prefix)/lib/sysusers.d/nvshare.conf
	install -Dm 644 systemd/nvshare.catalog $(DESTDIR)$(prefix)/lib/systemd/catalog/nvshare.catalog
	install -Dm 644 systemd/nvshare.tmpfiles $(DESTDIR)$(prefix)/lib/tmpfiles.d/nvshare.conf
	install -Dm 644 -t $(DESTDIR)$(prefix)/share/dbus-1/system.d dbus/org.nvshare.Scheduler1.conf
	install -Dm 644 -t $(DESTDIR)$(prefix)/share/dbus-1/system-services dbus/org.nvshare.Scheduler1.service
	install -Dm 644 -t $(DESTDIR)$(prefix)/share/dbus-1/interfaces dbus/org.nvshare.Scheduler1.xml
	install -Dm 644 -t $(DESTDIR)$(prefix)/share/polkit-1/actions dbus/org.nvshare.Scheduler1.policy
	install -Dm 644 dbus/org.nvshare.Scheduler1.rules $(DESTDIR)$(prefix)/share/polkit-1/rules.d/50-nvshare.rules
	install -Dm 644 -t $(DESTDIR)$(cockpitdir) cockpit/manifest.json cockpit/index.html $(wildcard cockpit/*.js cockpit/*.css)
	for page in $(filter-out $(IN_IMAGE),$(wildcard man/*.[0-9])); do install -Dm 644 -t $(DESTDIR)$(mandir)/man$${page##*.} $$page || exit; done
	@# The other names of that page.
	for name in nvshare-scheduler nvshare-checkpoint nvshare-hibernate nvshare.socket nvshare-control.socket \
	    nvshare-metrics.socket nvshare-checkpoint.socket nvshare-hibernate.socket nvshare-boot.service; do \
	    ln -sf nvshare.service.8 $(DESTDIR)$(mandir)/man8/$$name.8 || exit; done

# Removes all files that `install` would install, except settings.
uninstall:
	@! grep -qs libnvshare /etc/ld.so.preload || { echo 'First: nvsharectl preload disable' >&2; exit 1; }
	rm -rf $(TARGET)/installed
	$(MAKE) --no-print-directory install DESTDIR='$(abspath $(TARGET))/installed' >/dev/null
	cd $(TARGET)/installed && find . ! -type d ! -name nvshare.toml -print0 | (cd $(DESTDIR)/ && xargs -0 rm -fv)
	rm -rf $(TARGET)/installed

# The build gets a separate home directory (see debian/rules). --no-check-builddeps is set, because
# cargo is rarely installed from Debian's package.
deb:
	@tests/needs.sh cargo cc libc.a dpkg-buildpackage dh
	@mkdir -p '$(PACKAGES)'
	NVSHARE_VERSION='$(VERSION)' NVSHARE_PACKAGES='$(PACKAGES)' \
	    dpkg-buildpackage --build=binary --no-check-builddeps --rules-target=clean,binary
	@echo 'Built, and -dbgsym packages with the lines of backtraces. To install:'
	@echo "  sudo apt install $$(sed -n '/-dbgsym_/d; s|^\([^ ]*\.deb\) .*|$(PACKAGES)/\1|p' debian/files | paste -sd ' ')"
	@dh_clean -Xvendor/

# Packs the last commit. cargo vendor prints the configuration that makes cargo use the vendored
# crates.
dist:
	@tests/needs.sh cargo
	rm -rf $(TARGET)/dist
	mkdir -p $(TARGET)/dist
	git archive --prefix=$(DIST)/ HEAD | tar -x -C $(TARGET)/dist
	cd $(TARGET)/dist/$(DIST) && $(CARGO) vendor --locked --sync preload/Cargo.toml vendor >vendor.toml
	cd $(TARGET)/dist/$(DIST) && cat vendor.toml >>.cargo/config.toml && rm vendor.toml
	tar -C $(TARGET)/dist -cJf $(TARGET)/dist/$(DIST).tar.xz $(DIST)
	rm -r $(TARGET)/dist/$(DIST)
	@echo 'To build it without a network: tar -xJf $(TARGET)/dist/$(DIST).tar.xz && cd $(DIST) && make deb'

apt-repository:
	@tests/needs.sh apt-ftparchive dpkg-deb gpg
	@KEY='$(KEY)' URL='$(URL)' debian/apt-repository.sh '$(PACKAGES)' '$(REPOSITORY)'

clean:
	$(CARGO) clean
