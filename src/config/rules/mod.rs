//! Rules: limits and shares of programs by unit, container, user and so on. The first rule that
//! matches a program applies.
//!
//! - `rule`: one rule.
//! - `list`: all rules, in order.
//! - `parse`: parses `[[rule]]` of the configuration, with an error for each kind of mistake.
//! - `runtime`: rules that were set while the daemon runs.
//! - `values`: the values of a rule's keys. `gpu_hours`, `gpu_names` and `patterns` contain the
//!   more complex values.
//! - `matching`: finds the rule of a program, and the programs that count together under the rule.
//! - `env_limits`: tighter limits that programs set for themselves in their environment.
//! - `places`: the GPUs that a rule's programs may use, and the programs that may share those GPUs.

mod env_limits;
mod gpu_hours;
mod gpu_names;
mod list;
mod matching;
mod parse;
mod patterns;
mod places;
mod rule;
mod runtime;
mod values;

pub use env_limits::{EnvLimits, variable};
pub use gpu_hours::{GpuHours, Window};
pub use gpu_names::GpuName;
pub use list::Rules;
pub use matching::Instance;
pub use parse::{RawRule, Unknown, read, read_one};
pub use places::Whereabouts;
pub use rule::{LIMIT_KEYS, Origin, Rule, SUBJECT_KEYS, Subject};
pub use runtime::{Added, Addition};
