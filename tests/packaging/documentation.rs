//! Compares the man pages and the configuration file with the programs.

use std::{collections::BTreeSet, path::Path};

use clap::CommandFactory;
use nvshare::config::rules::{LIMIT_KEYS, SUBJECT_KEYS};
use nvshare::ctl::arguments::Arguments;

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The items of a page's lists, as plain words: `.It Fl -json` is `--json`.
fn items(page: &str) -> Vec<String> {
    let text = read(page);
    let items = text.lines().filter_map(|line| line.strip_prefix(".It "));
    let plain = |item: &str| {
        let words = item.split(' ').filter(|word| !["Ic", "Cm", "Li", "Va", "Ev", "Pa", "Xo"].contains(word));
        words.collect::<Vec<_>>().join(" ").replace("Fl ", "-")
    };
    items.map(plain).collect()
}

fn commands(command: &clap::Command, above: &str, found: &mut Vec<String>) {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
        let name = format!("{above}{}", sub.get_name());
        if sub.has_subcommands() {
            commands(sub, &format!("{name} "), found);
        } else {
            found.push(name);
        }
    }
}

#[test]
fn nvsharectl_1_has_every_command_and_option() {
    let command = Arguments::command();
    let mut names = Vec::new();
    commands(&command, "", &mut names);
    assert!(names.len() > 10, "{names:?}");
    let items = items("man/nvsharectl.1");
    for name in names {
        let described = |item: &String| item == &name || item.starts_with(&format!("{name} "));
        assert!(items.iter().any(described), "nvsharectl {name} is not in the page: {items:?}");
    }
    for option in command.get_arguments().filter_map(|option| option.get_long()) {
        // If an item has several flags, only the first has its own macro.
        let names = [format!("--{option}"), format!("-{option}")];
        let described =
            |item: &String| item.starts_with('-') && item.split(' ').any(|word| names.iter().any(|n| n == word));
        assert!(items.iter().any(described), "--{option} is not in the page: {items:?}");
    }
}

/// One line of the SYNOPSIS, with its commands and options.
struct Synopsis {
    commands: Vec<String>,
    options: BTreeSet<String>,
}

/// Returns the lines of the SYNOPSIS in nvsharectl(1). Each line begins with `.Nm`.
fn synopsis() -> Vec<Synopsis> {
    let text = read("man/nvsharectl.1");
    let (_, rest) = text.split_once(".Sh SYNOPSIS\n").expect("the section");
    let entries = rest.split(".Sh ").next().unwrap_or_default().split(".Nm\n").skip(1);
    entries.map(entry).collect()
}

fn entry(text: &str) -> Synopsis {
    let words: Vec<&str> = text.split_whitespace().map(|word| word.trim_start_matches('.')).collect();
    // `.Cm adopt | release` stands for both commands. The word after `.Op Cm` is a command, too.
    // The next macro ends the list.
    let begin = match words[..] {
        ["Cm", ..] => 1,
        _ => words.windows(2).position(|pair| pair == ["Op", "Cm"]).map_or(words.len(), |at| at + 2),
    };
    let is_macro = |word: &str| ["Ar", "Cm", "Fl", "Op"].contains(&word);
    let command: Vec<&str> = words[begin..].iter().copied().take_while(|word| !is_macro(word)).collect();
    let commands = command.join(" ").split(" | ").filter(|name| !name.is_empty()).map(str::to_owned).collect();
    let options = words.windows(2).filter(|pair| pair[0] == "Fl").map(|pair| format!("-{}", pair[1]));
    Synopsis { commands, options: options.filter(|option| option != "--").collect() }
}

/// Returns a command's options according to clap, except the global options.
fn options(command: &clap::Command) -> BTreeSet<String> {
    let own = command
        .get_arguments()
        .filter(|option| !option.is_global_set() && !option.is_hide_set() && option.get_id() != "help");
    // Options with a letter are compared by their letter, because the page may name only the
    // letter.
    own.filter_map(|option| match (option.get_long(), option.get_short()) {
        (_, Some(letter)) => Some(format!("-{letter}")),
        (Some(long), None) => Some(format!("--{long}")),
        (None, None) => None,
    })
    .collect()
}

#[test]
fn nvsharectl_1_synopsis_has_every_command_with_its_options() {
    let lines = synopsis();
    let root = Arguments::command();
    let mut names = Vec::new();
    commands(&root, "", &mut names);
    for name in names {
        let about: Vec<_> = lines.iter().filter(|line| line.commands.contains(&name)).collect();
        assert!(!about.is_empty(), "nvsharectl {name} is not in the SYNOPSIS");
        let command = name.split(' ').fold(&root, |command, word| command.find_subcommand(word).expect("a command"));
        let shown: BTreeSet<_> = about.iter().flat_map(|line| &line.options).cloned().collect();
        let global = ["--control"].map(str::to_owned).into();
        let shown: BTreeSet<_> = shown.difference(&global).cloned().collect();
        assert_eq!(shown, options(command), "the options of nvsharectl {name} in the SYNOPSIS, and in the program");
    }
    // Checks that each command of the page exists, too.
    for name in lines.iter().flat_map(|line| &line.commands) {
        let found = name.split(' ').try_fold(&root, |command, word| command.find_subcommand(word));
        assert!(found.is_some(), "the SYNOPSIS has nvsharectl {name}, which does not exist");
    }
}

/// Each setting is a commented line of the file, with its default. The file's comments name the
/// keys of rules.
#[test]
fn nvshare_toml_and_its_page_have_every_setting_and_every_key_of_a_rule() {
    let file = read("etc/nvshare.toml");
    let settings: Vec<&str> = file
        .lines()
        .filter_map(|line| line.strip_prefix('#')?.split_once(" = "))
        .map(|(key, _)| key)
        .filter(|key| key.chars().all(|c| c.is_ascii_lowercase() || c == '-'))
        .collect();
    assert!(settings.len() > 7, "{settings:?}");
    let of_rules = [&SUBJECT_KEYS[..], &LIMIT_KEYS[..]].concat();
    let items = items("man/nvshare.toml.5");
    for key in settings.iter().chain(&of_rules) {
        let is_there = items.iter().any(|item| item.split(' ').any(|word| word == *key));
        assert!(is_there, "{key} is not in the page: {items:?}");
    }
    for key in of_rules {
        let is_word = |line: &str| line.split(|c: char| !(c.is_alphanumeric() || c == '-')).any(|word| word == key);
        assert!(file.lines().any(is_word), "{key} is not in etc/nvshare.toml");
    }
}

#[test]
fn org_nvshare_scheduler1_5_has_every_member() {
    let (page, xml) = (read("man/org.nvshare.Scheduler1.5"), read("dbus/org.nvshare.Scheduler1.xml"));
    let members = ["<method name=\"", "<property name=\"", "<signal name=\""].map(|start| {
        xml.split(start).skip(1).filter_map(|rest| rest.split('"').next()).map(str::to_owned).collect::<Vec<_>>()
    });
    let members = members.concat();
    assert!(members.len() > 7, "{members:?}");
    for member in members {
        assert!(
            page.lines().any(|line| line.starts_with(".It") && line.contains(&member)),
            "{member} is not in the page"
        );
    }
}

/// The names and texts of the Markdown files in these folders.
fn pages(folders: &[&str]) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let in_folder = |folder: &&str| {
        let files = std::fs::read_dir(root.join(folder)).unwrap_or_else(|e| panic!("{folder}: {e}"));
        let names = files.map(|file| file.expect("a file").file_name().into_string().expect("a name"));
        let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        names.filter(|name| name.ends_with(".md")).map(|name| prefix.clone() + &name).collect::<Vec<_>>()
    };
    folders.iter().flat_map(in_folder).map(|name| (name.clone(), read(&name))).collect()
}

fn pages_for_users() -> Vec<(String, String)> {
    let mut found = pages(&["docs", "docs/recipes"]);
    found.push(("README.md".to_owned(), read("README.md")));
    found
}

#[test]
fn the_readme_links_every_page_for_users() {
    let readme = read("README.md");
    let pages = pages_for_users();
    assert!(pages.len() > 8, "{pages:?}");
    for (name, _) in pages.iter().filter(|(name, _)| name != "README.md") {
        assert!(readme.contains(&format!("({name})")), "README.md has no link to {name}");
    }
}

/// Returns the anchor that GitHub creates for a page's heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Targets of a page's links and pictures within this repository.
fn targets(text: &str) -> Vec<&str> {
    let links = text.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
    let sources = ["src=\"", "srcset=\""].into_iter().flat_map(|start| text.split(start).skip(1));
    let pictures = sources.filter_map(|rest| rest.split('"').next());
    links.chain(pictures).filter(|target| !target.contains("://")).collect()
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut found = 0;
    for (name, text) in pages(&["", "bench", "bench/gpu", "docs", "docs/recipes", "kubernetes"]) {
        let folder = Path::new(&name).parent().expect("a folder");
        for target in targets(&text) {
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let file = if file.is_empty() { Path::new(&name).to_owned() } else { folder.join(file) };
            let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
            assert!(file.exists(), "{name} links {target}, which does not exist");
            if !heading.is_empty() {
                let page = std::fs::read_to_string(&file).expect("a page");
                let mut headings = page.lines().filter(|line| line.starts_with('#'));
                let is_there = headings.any(|line| anchor(line.trim_start_matches('#')) == heading);
                assert!(is_there, "{name} links {target}, and there is no such heading");
            }
            found += 1;
        }
    }
    assert!(found > 100, "{found}");
}

#[test]
fn pages_for_users_name_existing_commands() {
    let command = Arguments::command();
    let in_code = |line: &str| -> Vec<String> {
        let starts = line.match_indices("nvsharectl ").filter(|(at, _)| {
            let before = line[..*at].trim_end_matches("sudo ");
            before.is_empty() || before.ends_with('`')
        });
        let word = |at: usize| line[at..].split([' ', '`', ')', ',']).nth(1).unwrap_or_default().to_owned();
        starts.map(|(at, _)| word(at)).collect()
    };
    let mut found = 0;
    for (name, text) in pages_for_users() {
        for word in text.lines().flat_map(in_code).filter(|word| !word.starts_with('-')) {
            assert!(command.find_subcommand(&word).is_some(), "{name} has `nvsharectl {word}`, which does not exist");
            found += 1;
        }
    }
    assert!(found > 20, "{found}");
}

/// Returns the file names and the texts of the man pages.
fn man_pages() -> Vec<(String, String)> {
    let files = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("man")).expect("the folder");
    let names = files.map(|file| file.expect("a file").file_name().into_string().expect("a name"));
    names.map(|name| (name.clone(), read(&format!("man/{name}")))).collect()
}

#[test]
fn man_pages_refer_to_existing_pages_and_sections() {
    let pages = man_pages();
    let makefile = read("Makefile");
    let is_ours = |name: &str| ["nvshare", "libnvshare", "org.nvshare"].iter().any(|start| name.starts_with(start));
    let mut found = 0;
    for (page, text) in &pages {
        let lines: Vec<&str> = text.lines().collect();
        for (number, line) in lines.iter().enumerate() {
            let words: Vec<&str> = line.split(' ').collect();
            // In an item or after another macro, a reference has no leading dot.
            let at = words.iter().position(|word| matches!(*word, ".Xr" | "Xr"));
            if let Some([name, section, ..]) = at.map(|at| &words[at + 1..])
                && is_ours(name)
            {
                // Other names of a page are links that the Makefile creates.
                let exists = pages.iter().any(|(file, _)| *file == format!("{name}.{section}"))
                    || makefile.contains(&format!(" {name} ")) && *section == "8";
                assert!(exists, "{page} refers to {name}({section}), which does not exist");
                found += 1;
            }
            if let Some(heading) = line.strip_prefix(".Sx ") {
                let heading = heading.trim_end_matches([' ', '.', ',', ')', ';']);
                // A reference to a section of another page has the form `.Sx NAME`, `in`, `.Xr page
                // 8`.
                let other = match lines[number..] {
                    [_, "in", reference, ..] => reference.strip_prefix(".Xr ").map(|words| words.split(' ').take(2)),
                    _ => None,
                };
                let file = other.map_or_else(|| page.clone(), |words| words.collect::<Vec<_>>().join("."));
                let text = &pages.iter().find(|(name, _)| *name == file).expect("a page").1;
                let is_there = [".Sh ", ".Ss "].iter().any(|kind| text.contains(&format!("\n{kind}{heading}\n")));
                assert!(is_there, "{page} refers to {heading} in {file}, which does not exist");
            }
        }
    }
    assert!(found > 50, "{found}");
}

/// Readers of nvsharectl(1) must find the pages that were split off from it.
#[test]
fn nvsharectl_1_lists_the_pages_about_its_commands() {
    let page = read("man/nvsharectl.1");
    let (_, see_also) = page.split_once(".Sh SEE ALSO\n").expect("the section");
    for (name, text) in man_pages().iter().filter(|(name, _)| name.starts_with("nvshare-")) {
        if text.contains("\n.Nm nvsharectl\n") || text.contains(".Ql nvsharectl debug") {
            let (name, section) = name.rsplit_once('.').expect("a section");
            assert!(see_also.contains(&format!(".Xr {name} {section}")), "{name}({section}) is not in SEE ALSO");
        }
    }
}
