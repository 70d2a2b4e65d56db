#!/bin/sh
# Counts phrases that are hard to read, in comments and pages: subjects without a noun, passives
# without an actor, and idioms with a plainer word. It is a hint: a clear sentence may keep its words.
#
#     tests/prose.sh            a number for each file that has any, the most first, and the sum
#     tests/prose.sh --list     each place: file, line and phrase
#     tests/prose.sh --new [BRANCH]  places in lines added since BRANCH (main) was left; exit status 0
set -eu
cd "$(dirname "$0")/.."

# Sources, of which `places` reads the comments, and pages.
files() {
    git ls-files '*.rs' '*.sh' '*.toml' '*.yaml' '*.py' '*.c' '*.md' 'man/*' Makefile |
        grep -vE '^(bench/FIGURES\.md|tests/prose\.sh|.*/Cargo\.toml)$'
}

# Reads files whose names are given, or a diff from stdin, and prints "file:line: phrase".
places() {
    awk -v diff="$1" '
        BEGIN {
            # Words only: a space is put on either side.
            n = split("whoever|whom|somebody|nobody|everybody|whichever|(by|for|to|if|with|from|than|as) who" \
                "#(of|by|from|to|with|for|in|than|on|as|and|is|are) what|what (it|they) (is|are|may|has|have|had|needs?)" \
                "#that of|those of|those that|those which|the ones? (that|which)|the one of" \
                "#it is (looked|asked|waited|found out|told|tried|seen|noticed|counted)|being found out" \
                "#(of|by|to) (which|whose)" \
                "#so much|so many|as much as|as many as|as long as" \
                "#meanwhile|at hand|for good|all the same|as well|at once|goes? on|going on|lets? go of|comes? by" \
                "#there (is|are) no|(is|are) to be [a-z]+ed", patterns, "#")
        }
        function read(file, number, line, is_page,    i, words, text, found) {
            if (!is_page) {
                if (file ~ /\.(rs|c)$/) { if (!sub(/^.*(^|[ \t])\/\/[\/!]?/, "", line)) return }
                else if (!sub(/^(.*[ \t])?#[^!]/, "", line)) return
            } else if (file ~ /^man\// && line ~ /^\.\\"/) return
            gsub(/`[^`]*`/, "CODE", line)
            words = " " tolower(line) " "
            gsub(/[^a-z]+/, " ", words)
            # `Has the caller leave`: a causative that opens a comment.
            if (!is_page && line ~ /^ *(Has|Have|Lets) (the|a|an|what|CODE|its?|all|each) /) {
                sub(/^ */, "", line); print file ":" number ": " substr(line, 1, 30)
            }
            for (i = 1; i <= n; i++) {
                text = words
                while (match(text, " (" patterns[i] ") ")) {
                    found = substr(text, RSTART + 1, RLENGTH - 2)
                    print file ":" number ": " found
                    text = substr(text, RSTART + RLENGTH - 1)
                }
            }
        }
        diff == "" { read(FILENAME, FNR, $0, FILENAME ~ /\.md$|^man\//); next }
        /^\+\+\+ / { name = substr($0, 7); next }
        /^@@ / { split($3, at, ","); number = at[1] + 0; next }
        /^\+/ { read(name, number++, substr($0, 2), name ~ /\.md$|^man\//) }' $2
}

all=$(files)
case ${1:-} in
--new)
    base=$(git merge-base "${2:-main}" HEAD) || { echo "$0: no branch ${2:-main} to compare with" >&2; exit 0; }
    # shellcheck disable=SC2086 # no file's name has a space
    git diff -U0 --no-color --no-ext-diff --src-prefix=a/ --dst-prefix=b/ "$base" -- $all | places diff ""
    ;;
--list) places "" "$all" ;;
*)
    places "" "$all" | awk -F: '{ of[$1]++; sum++ }
        END { for (f in of) print of[f], f | "sort -rn"; close("sort -rn"); print sum + 0, "in all" }'
    ;;
esac
