"""Looks at nvshare's page in Cockpit as a browser shows it: as a user, as a member of the group
nvshare, as an administrator, and without polkit. cockpit.sh starts it in a booted system."""

import argparse
import os
import subprocess
import time

from browser import Browser
from machine import BUS, URL, client, is_so, program, run, status, step

parser = argparse.ArgumentParser()
parser.add_argument("--user", required=True)
parser.add_argument("pictures", nargs="?", help="a directory for pictures")
options = parser.parse_args()

POLKIT = "/usr/share/dbus-1/system-services/org.freedesktop.PolicyKit1.service"


def picture(browser, name, width=1280, height=1000):
    if options.pictures:
        browser.size(width, height)
        for scheme in ("light", "dark"):
            browser.scheme(scheme)
            browser.wait(scheme, f"page.documentElement.dataset.theme === '{scheme}'")
            time.sleep(1.2)
            browser.picture(os.path.join(options.pictures, f"{name}-{scheme}.png"))
        browser.scheme("light")
        browser.size(1280, 900)


def visit(browser, path):
    browser.run(f"(view.location.hash = '#/{path}', true)")


def check_accessible(browser, what):
    """Everything that can have the focus, and every picture, has a name for screen readers."""
    nodes = browser.accessible()
    roles = {node["role"] for node in nodes}
    assert {"banner", "navigation", "main"} <= roles or {"navigation", "main"} <= roles, roles
    controls = {"button", "link", "textbox", "searchbox", "combobox", "spinbutton", "img", "image", "region", "figure"}
    unnamed = [node for node in nodes if node["role"] in controls - {"figure"} and not node["name"]]
    assert not unnamed, f"{what}: {unnamed}"
    assert sum(node["role"] in controls for node in nodes) > 3, nodes


def check_narrow(browser, what):
    """At a width of 400 pixels, nothing but tables is wider than the page."""
    browser.size(400, 800)
    browser.wait(f"{what} to be narrow", "page.documentElement.clientWidth <= 400 && page.documentElement.clientWidth > 0")
    wide = browser.run(
        "[...page.querySelectorAll('main *')].filter(one => one.getBoundingClientRect().right > page.documentElement.clientWidth + 1"
        " && !one.closest('.scrolls, pre')).map(one => one.outerHTML.slice(0, 80))")
    assert not wide, f"{what}: {wide}"
    assert browser.run("page.documentElement.scrollWidth <= page.documentElement.clientWidth"), what
    browser.size(1280, 900)


def check_errors(browser):
    assert not browser.events, browser.events


def settings_are_read_only(browser):
    visit(browser, "settings")
    browser.wait_text("Time quantum")
    browser.wait("a sentence about administrators", "!!page.querySelector('#read-only')")
    assert browser.buttons() == [], browser.buttons()
    assert not browser.exists("main input, main textarea, main select")


def starting():
    step("the page says how to start")
    browser = Browser(URL)
    browser.log_in(options.user, f"secret-{options.user}")
    browser.wait_text("systemctl enable --now nvshare.socket")
    browser.wait_text("nvsharectl run -- python train.py")
    picture(browser, "empty", height=700)
    check_narrow(browser, "the empty state")
    check_accessible(browser, "the empty state")
    run("systemctl", "enable", "--now", "--quiet", "nvshare.socket")
    check_errors(browser)
    browser.close()


def as_user(own, other):
    step("a user sees GPUs, programs, turns and the queue")
    browser = Browser(URL)
    browser.log_in(options.user, f"secret-{options.user}")
    browser.wait("two GPUs", "page.querySelectorAll('.gpu').length === 2")
    assert not browser.exists("#start"), "the socket is active"
    browser.wait_text(f"cuda-program ({own})", "#programs")
    browser.wait_text(f"cuda-program ({other})", "#programs")
    for gpu in (0, 1):
        label = browser.run(f"page.querySelectorAll('.gpu')[{gpu}].querySelector('.meter').ariaLabel")
        assert label.startswith("Memory, 256 MiB: ") and "Free" in label, label
    browser.wait("a holder", "!!page.querySelector('.holders a')")
    browser.wait("turns", "[...page.querySelectorAll('canvas')].some(one => one.ariaLabel.includes('has the lock'))")
    # Other users' programs are anonymous in the past, as in `nvsharectl timeline`.
    lanes = browser.run("[...page.querySelectorAll('canvas')].map(one => one.ariaLabel).join()")
    assert "another user's program" in lanes, lanes
    assert browser.run("[...page.querySelectorAll('.gpu button')].length") == 0, "a user may not drain GPUs"
    browser.wait_text("Programs waited", ".gpu")
    picture(browser, "overview", height=1500)
    check_narrow(browser, "the overview")
    picture(browser, "narrow", width=400, height=900)
    check_accessible(browser, "the overview")

    step("the list finds programs")
    browser.type("#find", str(own))
    browser.wait("one program", f"page.querySelectorAll('#programs tbody tr').length === 1 && page.querySelector('#programs').innerText.includes('{own}')")
    browser.type("#find", options.user)
    browser.wait("the user's program", "page.querySelectorAll('#programs tbody tr').length === 1")
    browser.type("#find", "no such program")
    browser.wait_text("No program matches")

    step("the page follows the keyboard and the colours")
    browser.run("(page.querySelector('#tabs a').focus(), true)")
    browser.key("Tab", 9)
    browser.key("Enter", 13, "\r")
    browser.wait("the usage", "view.location.hash === '#/usage'")
    browser.scheme("dark")
    browser.wait("dark colours", "view.getComputedStyle(page.body).backgroundColor === 'rgb(21, 21, 21)'")
    browser.scheme("light")
    browser.wait("light colours", "view.getComputedStyle(page.body).backgroundColor === 'rgb(242, 242, 242)'")

    step("users see their own use")
    browser.wait_text("your own use")
    browser.wait_text(options.user, "main table")
    assert "root" not in browser.run("page.querySelector('main table').innerText")
    browser.wait("a plot", "page.querySelectorAll('main svg rect').length > 0")
    browser.choose("#by", "unit")
    browser.wait_text("By unit")
    check_narrow(browser, "the usage")
    check_accessible(browser, "the usage")

    step("users pause, resume and move their own programs")
    visit(browser, f"program/{own}")
    browser.wait_text("What it is doing")
    browser.wait_text("--seconds", ".facts")
    picture(browser, "program", height=1100)
    check_narrow(browser, "a program")
    check_accessible(browser, "a program")
    browser.click("#pause")
    is_so("the program to be paused", lambda: client(own)["paused"] and client(own)["sleep"] == "sleeping")
    browser.wait_text("Paused")
    browser.click("#resume")
    is_so("the program to continue", lambda: not client(own)["paused"] and client(own)["sleep"] == "awake")
    before = client(own)["gpus"][0]["uuid"]
    browser.click("#move")
    is_so("the program to have moved", lambda: client(own)["sleep"] == "awake" and client(own)["gpus"][0]["uuid"] != before)
    browser.wait_text("The program has moved")

    step("users control no other programs and no settings")
    visit(browser, f"program/{other}")
    browser.wait_text("What it is doing")
    browser.wait_text(f"process {other}")
    assert browser.buttons() == [], browser.buttons()
    assert "Command" not in browser.text(), "a user sees the command line of another user's program"
    settings_are_read_only(browser)
    check_accessible(browser, "the settings")
    visit(browser, "program/999999")
    browser.wait_text("no program under nvshare has process ID 999999".capitalize().replace("id", "ID"))
    check_errors(browser)
    browser.close()


def as_member():
    step("a member of the group nvshare may change no settings either")
    browser = Browser(URL)
    browser.log_in("bob", "secret-bob")
    browser.wait("two GPUs", "page.querySelectorAll('.gpu').length === 2")
    settings_are_read_only(browser)
    visit(browser, "usage")
    browser.wait_text("your own use")
    browser.wait_text("No program has used a GPU in this time.")
    check_errors(browser)
    browser.close()


def as_administrator(own):
    step("an administrator changes settings and rules")
    browser = Browser(URL)
    browser.log_in("carol", "secret-carol", administrator=True)
    browser.wait("buttons to drain GPUs", "page.querySelectorAll('.gpu button').length === 2")
    visit(browser, "settings")
    browser.type("#set-TimeQuantum", "47")
    browser.click("#set-TimeQuantum-save")
    browser.wait_text("Time quantum is now 47.")
    assert run("busctl", "get-property", *BUS, "TimeQuantum") == "u 47"
    browser.type("#set-TimeQuantum", "0")
    browser.click("#set-TimeQuantum-save")
    browser.wait_text("1 to 3600")
    assert run("busctl", "get-property", *BUS, "TimeQuantum") == "u 47"
    browser.type("#rule-name", "mine")
    browser.type("#rule-keys", f"user={options.user}\nweight=50\nmemory-max=200M")
    browser.click("#rule-save")
    browser.wait_text("user = alice", "#rules")
    assert 'name = "mine"' in run("nvsharectl", "get")
    picture(browser, "settings", height=1200)
    check_narrow(browser, "the settings")
    check_accessible(browser, "the settings")
    browser.click("[aria-label='Remove the rule mine']")
    browser.wait_text("The rule mine is removed.")
    browser.click("#reset")
    browser.wait("a question", "!!page.querySelector('dialog[open]')")
    browser.key("Escape", 27)
    browser.wait("no question", "!page.querySelector('dialog')")
    assert run("busctl", "get-property", *BUS, "TimeQuantum") == "u 47", "Escape means no"
    browser.click("#reset")
    browser.click("dialog .danger")
    browser.wait_text("The configuration files are in effect.")
    assert run("busctl", "get-property", *BUS, "TimeQuantum") == "u 30"

    step("an administrator drains a GPU, and sees all users' programs and use")
    visit(browser, "")
    browser.click(".gpu:last-child .head button")
    is_so("the GPU to be drained", lambda: status()["gpus"][1]["drained"])
    browser.wait_text("Drained")
    browser.click(".gpu:last-child .head button")
    is_so("the GPU to take programs again", lambda: not status()["gpus"][1]["drained"])
    visit(browser, f"program/{own}")
    browser.wait_text("--seconds", ".facts")
    browser.wait("a button to pause", "!!page.querySelector('#pause')")
    visit(browser, "usage")
    browser.wait_text("root", "main table")
    picture(browser, "usage", height=900)
    check_errors(browser)
    browser.close()


def without_polkit(own, other):
    step("without polkit, users control only their own programs")
    os.rename(POLKIT, POLKIT + ".away")
    try:
        run("systemctl", "mask", "--now", "--runtime", "--quiet", "polkit.service")
        run("busctl", "call", "org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "ReloadConfig")
        browser = Browser(URL)
        browser.log_in(options.user, f"secret-{options.user}")
        browser.wait("two GPUs", "page.querySelectorAll('.gpu').length === 2")
        settings_are_read_only(browser)
        visit(browser, f"program/{other}")
        browser.wait_text(f"process {other}")
        assert browser.buttons() == [], browser.buttons()
        visit(browser, f"program/{own}")
        browser.click("#pause")
        is_so("the program to be paused", lambda: client(own)["paused"])
        browser.click("#resume")
        is_so("the program to continue", lambda: not client(own)["paused"])
        check_errors(browser)
        browser.close()
    finally:
        os.rename(POLKIT + ".away", POLKIT)
        run("systemctl", "unmask", "--runtime", "--quiet", "polkit.service")
        run("busctl", "call", "org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "ReloadConfig")


def failing(browser_of=Browser):
    step("a scheduler that does not start is reported, and found again")
    run("systemctl", "mask", "--now", "--runtime", "--quiet", "nvshare.service", "nvshare.socket", "nvshare-control.socket")
    browser = browser_of(URL)
    browser.log_in(options.user, f"secret-{options.user}")
    browser.wait_text("The scheduler is not running.")
    run("systemctl", "unmask", "--runtime", "--quiet", "nvshare.service", "nvshare.socket", "nvshare-control.socket")
    run("systemctl", "start", "nvshare.socket", "nvshare.service")
    browser.wait("two GPUs", "page.querySelectorAll('.gpu').length === 2")
    check_errors(browser)
    browser.close()


starting()
arguments = ["naps", "--mem", "96M", "--seconds", "900", "--pause-ms", "5"]
programs = [program("root", *arguments), program(options.user, *arguments), program("root", *arguments), program("root", *arguments)]
try:
    as_user(programs[1], programs[0])
    as_member()
    as_administrator(programs[1])
    without_polkit(programs[1], programs[0])
finally:
    for pid in programs:
        subprocess.run(["kill", "-KILL", str(pid)], check=False)
failing()
