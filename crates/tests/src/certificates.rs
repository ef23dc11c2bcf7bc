//! Certificates for tests, created by openssl and valid for a day.

use crate::server::Sandbox;
use crate::tools::{command, run};
use std::path::PathBuf;

/// Extensions for openssl's certificates.
const EXTENSIONS: &str = "\
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = DNS:localhost, IP:127.0.0.1
[client]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = clientAuth
";

/// Creates an authority in `folder`, and certificates for a server and a client, under the names that nbdkit,
/// qemu and libnbd use.
///
/// # Panics
/// If openssl fails.
#[track_caller]
pub fn certificates(sandbox: &Sandbox, folder: &str) -> PathBuf {
    let path = sandbox.path(folder);
    std::fs::create_dir(&path).unwrap();
    std::fs::write(path.join("openssl.cnf"), EXTENSIONS).unwrap();
    let openssl = |words: &str| {
        let mut openssl = command(&["openssl"]);
        run(openssl.current_dir(&path).args(words.split(' '))).ok();
    };
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
    openssl(&format!(
        "req -x509 -config openssl.cnf -extensions authority {key} -days 1 -subj /CN=authority \
         -keyout ca-key.pem -out ca-cert.pem"
    ));
    for side in ["server", "client"] {
        openssl(&format!(
            "req -new -config openssl.cnf {key} -subj /CN={side} -keyout {side}-key.pem -out {side}.csr"
        ));
        openssl(&format!(
            "x509 -req -in {side}.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 1 \
             -extfile openssl.cnf -extensions {side} -out {side}-cert.pem"
        ));
    }
    path
}
