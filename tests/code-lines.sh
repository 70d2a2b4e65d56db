#!/bin/sh
# Counts the lines of Rust code in each folder. Blank lines and comments do not count. Items under
# `#[cfg(test)]`, and the files of modules that such items declare, do not count either. The script
# relies on rustfmt: an item ends on a line with the indentation of its first line.
#
#   code-lines.sh FOLDER…
set -eu

[ $# -gt 0 ] || { echo "usage: $0 FOLDER…" >&2; exit 2; }
for folder; do
    [ -d "$folder" ] || { echo "$0: $folder is not a folder" >&2; exit 1; }
    find "$folder" -name target -prune -o -name '*.rs' -print | awk -v folder="$folder" '
        # Returns the folder of the modules that a file declares.
        function modules(file) {
            if (file ~ /\/(mod|lib|main)\.rs$/) sub(/\/[^\/]*$/, "", file); else sub(/\.rs$/, "", file)
            return file
        }
        function count(file,    line, code, name, indent, in_block, skipping) {
            while ((getline line <file) > 0) {
                code = line
                sub(/^[ \t]+/, "", code)
                if (in_block) { # a comment over several lines
                    if (code ~ /\*\//) in_block = 0
                    continue
                }
                if (code == "" || code ~ /^\/\//) continue
                if (code ~ /^\/\*/) {
                    in_block = code !~ /\*\//
                    continue
                }
                indent = length(line) - length(code)
                if (code == "#[cfg(test)]") {
                    skipping = 1
                    test_indent = indent
                    continue
                }
                if (skipping) {
                    if (match(code, /^(pub(\([a-z:]+\))? )?mod [a-z_0-9]+;/)) {
                        name = code
                        sub(/;.*/, "", name)
                        sub(/.* /, "", name)
                        excluded[modules(file) "/" name]
                    }
                    if (indent == test_indent && code ~ /(;|}|,)$/ && code !~ /^#\[/) skipping = 0
                    continue
                }
                lines[file]++
            }
            close(file)
        }
        { count($0) }
        END {
            for (file in lines) {
                is_test = 0
                for (module in excluded) if (file == module ".rs" || index(file, module "/") == 1) is_test = 1
                if (!is_test) total += lines[file]
            }
            printf "%7d  %s\n", total, folder
        }'
done
