//! Log lines with a documented meaning. Each line has a name in the code (`name:` in tracing's
//! macros), and an ID in the journal and in its catalog (`systemd/nvshare.catalog`). IDs never
//! change.

/// The `MESSAGE_ID` of the line with this name.
pub fn id(name: &str) -> Option<&'static str> {
    IDS.iter().find(|(known, _)| *known == name).map(|(_, id)| *id)
}

const IDS: &[(&str, &str)] = &[
    ("gpus-asked", "6b1f2d7c0a9e4d35b8c4f07e92a6d518"),
    ("client-connected", "bb785cb9d05f4fc3b70e30440bfbf0b8"),
    ("client-resumed", "4684efeb46d043ed97bbc4e456db5dae"),
    ("lock-lost", "5aecf845431d4cefb6face3fa971fa4a"),
    ("room-made", "2fff80d257064128babc49b16c8babc2"),
    ("room-closed", "74f3c6af051047cba2355aa4757e541c"),
    ("client-gone", "b55ea8e87f3a46909bf27d602a4e149b"),
    ("client-refused", "660965c112534847bade7d3cab2fabd0"),
    ("not-placed", "3f0d5b6c2a9e4c41a7b8d6e09c15f274"),
    ("client-silent", "83221df1dc85496a82a159d2c1dd4a06"),
    ("resumed", "eb7682eea4154213bb95f19024f1ab22"),
    ("memory-refused", "9241ecd8af6145d48484bacc3cc011f2"),
    ("eviction-blocked", "c37dd39127f649e984349e174d6102c8"),
    ("mapping-failed", "370360d50ce24096b085c2f33b227ff9"),
    ("accounting", "73ca17ac9b85496bbf57f6617e18c845"),
    ("context-waits", "74e85a6f35ab4f8b875c4232759d2902"),
    ("undrainable", "1e1bc34420914f6fbb64250d8b72704f"),
    ("untracked-work", "138a6293a47e4f66a0983fabfdd8d44d"),
    ("gpu-found", "c254032c48eb42339f89efb2a2c6461f"),
    ("gpu-gone", "92bbd89672934d3ea969a76fd8f761a4"),
    ("nvml-usable", "a9da5424392745228c34058cda630c3c"),
    ("driver-released", "c729cec25cc247b587fd2f07b8d524f7"),
    ("no-nvml", "9d5c1cc55b21452a90aac2c372fa83fc"),
    ("no-descriptors", "5f8443659767433c9253f462590595d2"),
    ("settings-changed", "6622fe9022e34528a03ecc4f8c472d74"),
    ("settings-kept", "333a711eca844280a506ce81a8bbfece"),
    ("settings-reset", "bbaec0f5d7264ea08fa6a0c8e103f6e0"),
    ("rules-changed", "4ac61284db4c40faa0ff4130ec3d6c84"),
    ("settings-ignored", "b975e78dc2bf4ec1bae99c05fb5ccaae"),
    ("settings-unsaved", "e1f5d85264cd433b8d56ce7675edb146"),
    ("configuration-read", "9f559feef19a448ea34021bab3d87425"),
    ("configuration-wrong", "e5a46eb3aef9431ba14731b7ac8c622c"),
    ("metrics-not-served", "2f0a6f4b7f5c4d0b9c5b0e8d7a4e61f3"),
    ("suspend", "fe450a46ae884458b566c7ba17a7f303"),
    ("host-resumed", "a94602fa24c245b1b4cfb7d9ca178fa3"),
    ("started", "acf6bc07a00d4831a5ed96566922874a"),
    ("cannot-start", "28d82b5ac34f445d8864a3dfb045e8a0"),
    ("stopping", "bd10fe47d675479cac02862aaed074ca"),
    ("bus-gone", "9cd82c7cf0904a6cb3084ce13f61021f"),
    ("over-budget", "7c0f52d1e9aa4b1f8f0b6f6b1f0d93c2"),
    ("processes-hidden", "a1d5c9be04f84c5f9a3e2c7f6b0d4e18"),
    ("lines-left-out", "56547018172a4b72b4b131a3afbb4c06"),
    ("foreign-checkpoint", "0f3b7a9c5d1e48b2a6c4e8f012d7953b"),
    ("log-lines-lost", "d376d6b6696c4bd3a886106262e032f3"),
];

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    use super::*;

    /// The quoted names after `name: ` in all source files below a directory.
    fn names_in_the_code(directory: &Path) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for file in std::fs::read_dir(directory).expect("the sources").flatten() {
            if file.path().is_dir() {
                names.append(&mut names_in_the_code(&file.path()));
                continue;
            }
            let text = std::fs::read_to_string(file.path()).expect("a source");
            let text = text.split("#[cfg(test)]").next().unwrap_or_default();
            names.extend(text.split("name: \"").skip(1).filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
        }
        names
    }

    #[test]
    fn names_of_log_lines_and_message_ids_match() {
        let known: BTreeSet<String> = IDS.iter().map(|(name, _)| (*name).to_owned()).collect();
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/daemon");
        assert_eq!(names_in_the_code(&sources), known);
        assert_eq!(known.len(), IDS.len(), "a name is there twice: `id` would return the first one's");
        let ids: BTreeSet<&str> = IDS.iter().map(|(_, id)| *id).collect();
        assert_eq!(ids.len(), IDS.len(), "an id is there twice");
        assert!(
            ids.iter().all(|id| id.len() == 32 && id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)))
        );
    }

    #[test]
    fn the_catalog_explains_exactly_the_known_ids() {
        let catalog = include_str!("../../../systemd/nvshare.catalog");
        let mut explained = BTreeMap::new();
        for entry in catalog.split("\n-- ").skip(1) {
            let (id, rest) = entry.split_once('\n').expect("an id on a line of its own");
            let (header, text) = rest.split_once("\n\n").expect("a header, and a text after an empty line");
            assert!(header.starts_with("Subject: "), "{id}: {header}");
            let text = text.split("\n# ").next().unwrap_or_default();
            assert!(!text.trim().is_empty(), "{id} is not explained");
            assert!(text.lines().all(|line| line.len() <= 110), "{id}: {text}");
            let subject = header.lines().next().unwrap_or_default().to_owned();
            assert_eq!(explained.insert(id.to_owned(), subject), None, "{id} is explained twice");
        }
        let known: BTreeSet<String> = IDS.iter().map(|(_, id)| (*id).to_owned()).collect();
        assert_eq!(explained.into_keys().collect::<BTreeSet<_>>(), known);
    }
}
