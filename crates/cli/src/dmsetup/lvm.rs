//! Names of LVM's devices, for the columns `subsystem`, `vg_name`, `lv_name` and `lv_layer` of `info`.

/// The subsystem whose device names are split.
const LVM: &str = "LVM";

/// Splits an LVM device name at its hyphens into volume group, logical volume and layer; a doubled hyphen
/// stands for one hyphen of a part's own.
fn parts(name: &str) -> [String; 3] {
    let mut parts = <[String; 3]>::default();
    let (mut at, mut chars) = (0, name.chars().peekable());
    while let Some(c) = chars.next() {
        if c == '-' && chars.next_if_eq(&'-').is_none() {
            at += 1;
        } else if let Some(part) = parts.get_mut(at) {
            part.push(c);
        }
    }
    parts
}

/// Returns the subsystem that created a device: the part of its UUID before the first hyphen.
pub(super) fn subsystem(uuid: &str) -> &str {
    uuid.split_once('-').map_or("", |(first, _)| first)
}

/// Returns volume group, logical volume and layer of a device that LVM created; empty texts for any other
/// device.
pub(super) fn of(name: &str, uuid: &str) -> [String; 3] {
    if subsystem(uuid) == LVM { parts(name) } else { Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_names_are_split_at_single_hyphens() {
        for (name, wanted) in [
            ("vg-lv", ["vg", "lv", ""]),
            ("vg--x-lv--y-real", ["vg-x", "lv-y", "real"]),
            ("a--b--c-d", ["a-b-c", "d", ""]),
            ("plain", ["plain", "", ""]),
            ("vg-lv_tmeta", ["vg", "lv_tmeta", ""]),
            ("", ["", "", ""]),
            ("a-b-c-d", ["a", "b", "c"]),
        ] {
            assert_eq!(parts(name), wanted, "{name}");
        }
        assert_eq!(of("vg-lv", "LVM-abc"), ["vg", "lv", ""]);
        assert_eq!(of("vg-lv", "mpath-abc"), ["", "", ""]);
    }
}
