//! `rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT],…`: an image of a Ceph cluster.

use super::SpecError;
use ::rbd::{Cache, RbdSpec};
use block::Bytes;
use options::{Escaped, OptionRow, Options, format_time, parse_time, write_choice, write_flag};
use std::fmt;
use std::path::PathBuf;

const CACHE: [(&str, Cache); 3] =
    [("none", Cache::None), ("writeback", Cache::Writeback), ("writearound", Cache::Writearound)];

/// The options of `rbd:`.
pub(super) const OPTIONS: &[OptionRow] = &[
    OptionRow::value("id", "USER", "admin", "the user, without client."),
    OptionRow::value("conf", "FILE", "$CEPH_CONF or /etc/ceph/ceph.conf", "the configuration of the cluster"),
    OptionRow::value("size", "SIZE", "", "the size of the image that is created; with create"),
    OptionRow::flag("create", "create the image if it is missing; with size"),
    OptionRow::value("object_size", "4K..32M", "4M", "the object size of an image that is created"),
    OptionRow::flag("ro", "read-only"),
    OptionRow::flag(
        "exclusive",
        "hold the exclusive lock, and refuse to start while another client holds it",
    ),
    OptionRow::value(
        "takeover",
        "TIME",
        "never",
        "blocklist a client that has not handed the exclusive lock over after this time",
    ),
    OptionRow::value("cache", "none|writeback|writearound", "none", "what librbd keeps in memory"),
    OptionRow::value("timeout", "TIME", "0", "fail requests that the cluster leaves unanswered; 0: never"),
];

const FIX: &str = "write rbd:POOL/IMAGE, rbd:POOL/NAMESPACE/IMAGE or rbd:POOL/IMAGE@SNAPSHOT";

pub(super) fn parse(what: &str, items: impl Iterator<Item = String>) -> Result<RbdSpec, SpecError> {
    let mut options = Options::new("rbd", OPTIONS, items)?;
    let (path, snapshot) = match what.split_once('@') {
        Some((path, snapshot)) => (path, Some(snapshot)),
        None => (what, None),
    };
    let parts: Vec<&str> = path.split('/').collect();
    let (pool, namespace, image) = match parts[..] {
        [pool, image] => (pool, None, image),
        [pool, namespace, image] => (pool, Some(namespace), image),
        _ => return Err(SpecError::new(format!("\"{what}\" names no pool and image"), FIX)),
    };
    let mut names = [Some(pool), namespace, Some(image), snapshot].into_iter().flatten();
    if names.any(|name| name.is_empty() || name.contains('\0')) {
        return Err(SpecError::new(format!("\"{what}\" has an empty name"), FIX));
    }
    let timeout = options.text("timeout")?.map(|text| parse_time(&text)).transpose()?;
    let spec = RbdSpec {
        pool: pool.to_owned(),
        namespace: namespace.map(str::to_owned),
        image: image.to_owned(),
        snapshot: snapshot.map(str::to_owned),
        user: options.text("id")?,
        conf: options.text("conf")?.map(PathBuf::from),
        create: None,
        object_size: object_size(&mut options)?,
        read_only: options.flag("ro")?,
        exclusive: options.flag("exclusive")?,
        takeover: options.text("takeover")?.map(|text| parse_time(&text)).transpose()?,
        cache: options.choice("cache", &CACHE)?.unwrap_or_default(),
        timeout: timeout.filter(|time| !time.is_zero()),
    };
    let size: Option<Bytes> = options.value("size", "10G")?;
    let create = match (options.flag("create")?, size) {
        (true, None) => return Err(SpecError::new("create needs a size", "write size=10G,create")),
        (false, Some(_)) => return Err(SpecError::new("size goes with create", "leave it out")),
        (_, size) => size.map(|size| super::stack::checked_size("an image", size)).transpose()?,
    };
    let is_read_only = spec.read_only || spec.snapshot.is_some();
    if create.is_some() && is_read_only {
        return Err(SpecError::new("a read-only image cannot be created", "leave out create and size"));
    }
    if create.is_none() && spec.object_size.is_some() {
        return Err(SpecError::new("object_size goes with create", "leave it out"));
    }
    if (spec.exclusive || spec.takeover.is_some()) && is_read_only {
        let why = "exclusive and takeover are for images that are written";
        return Err(SpecError::new(why, "leave them out"));
    }
    Ok(RbdSpec { create, ..spec })
}

fn object_size(options: &mut Options) -> Result<Option<u32>, SpecError> {
    let Some(size) = options.value::<Bytes>("object_size", "4M")? else { return Ok(None) };
    if !size.0.is_power_of_two() || !(4096..=32 << 20).contains(&size.0) {
        let why = format!("objects cannot have {size} bytes");
        return Err(SpecError::new(why, "use a power of two: 4K, 8K, … 32M"));
    }
    Ok(Some(size.0 as u32))
}

pub(super) fn write(f: &mut fmt::Formatter<'_>, spec: &RbdSpec) -> fmt::Result {
    write!(f, "rbd:{}", Escaped(&spec.place()))?;
    if let Some(user) = &spec.user {
        write!(f, ",id={}", Escaped(user))?;
    }
    if let Some(conf) = &spec.conf {
        write!(f, ",conf={}", Escaped(&conf.to_string_lossy()))?;
    }
    if let Some(size) = spec.create {
        write!(f, ",size={size},create")?;
    }
    if let Some(size) = spec.object_size {
        write!(f, ",object_size={}", Bytes(size.into()))?;
    }
    write_flag(f, spec.read_only, "ro")?;
    write_flag(f, spec.exclusive, "exclusive")?;
    if let Some(time) = spec.takeover {
        write!(f, ",takeover={}", format_time(time))?;
    }
    write_choice(f, "cache", spec.cache, &CACHE)?;
    match spec.timeout {
        Some(timeout) => write!(f, ",timeout={}", format_time(timeout)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use crate::StackSpec;
    use ::rbd::{Cache, RbdSpec};
    use block::Bytes;
    use std::time::Duration;

    #[test]
    fn an_image_with_all_options_parses_and_prints_the_same() {
        let text = "rbd:pool/team/disk,id=backup,conf=my.conf,size=10G,create,object_size=1M,exclusive,\
                    takeover=10s,cache=writeback,timeout=5s";
        let stack: StackSpec = text.parse().unwrap();
        assert_eq!(stack.to_string(), text);
        let StackSpec::Rbd(spec) = stack else { panic!() };
        let expected = RbdSpec {
            pool: "pool".into(),
            namespace: Some("team".into()),
            image: "disk".into(),
            user: Some("backup".into()),
            conf: Some("my.conf".into()),
            create: Some(Bytes::gib(10)),
            object_size: Some(1 << 20),
            exclusive: true,
            takeover: Some(Duration::from_secs(10)),
            cache: Cache::Writeback,
            timeout: Some(Duration::from_secs(5)),
            ..RbdSpec::default()
        };
        assert_eq!(spec, expected);
    }

    #[test]
    fn what_means_nothing_is_refused_with_a_fix() {
        for (text, why) in [
            ("rbd:disk", "names no pool and image"),
            ("rbd:a/b/c/d", "names no pool and image"),
            ("rbd:pool/", "empty name"),
            ("rbd:pool/disk@", "empty name"),
            ("rbd:pool/disk,create", "create needs a size"),
            ("rbd:pool/disk,size=1G", "size goes with create"),
            ("rbd:pool/disk@monday,size=1G,create", "read-only image cannot be created"),
            ("rbd:pool/disk,object_size=1M", "object_size goes with create"),
            ("rbd:pool/disk,size=1G,create,object_size=3M", "objects cannot have"),
            ("rbd:pool/disk,ro,exclusive", "are for images that are written"),
            ("rbd:pool/disk@monday,takeover=5s", "are for images that are written"),
            ("rbd:pool/disk,takeover=soon", "soon"),
        ] {
            let refused = text.parse::<StackSpec>().expect_err(text).to_string();
            assert!(refused.contains(why), "{text}: {refused}");
        }
    }
}
