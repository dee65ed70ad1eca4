// Who holds a lock, as its file says it, and whether that process is dead.
#pragma once

#include <optional>
#include <string>

namespace torch_ckpt {

// Every field is one word; "-" where it is not known.
struct LockHolder {
  std::string host;
  std::string machine;    // /etc/machine-id
  std::string boot;       // changes with every boot of a kernel
  std::string pid_space;  // in which `pid` is meant
  std::string pid;
  std::string start;  // of the process, in ticks since the boot
  std::string nonce;  // of this lock; may be a part of a file's name

  std::string ToText() const;
  std::string Name() const;  // "process 7 on host a"
};

// This process, with a nonce that no other call in it gets.
LockHolder ThisProcess();

// nullopt for a text that was cut short, or is none.
std::optional<LockHolder> ParseLockHolder(const std::string& text);

// True only on proof; doubt means alive. A lock too many is an error that
// somebody can clear up, a lock too few is a damaged checkpoint. Proof is
//   - the same boot and process ids of one space, and no such process, or one
//     that began at another time;
//   - the same machine under the same host name at another boot, both told by
//     its first process space: what a container calls its machine may be many,
//     and so may virtual machines that were cloned from one image.
// Another boot under the same host name proves nothing: two live pods may have
// one name, and each its host's boot.
bool ProvablyDead(const LockHolder& holder);

}  // namespace torch_ckpt
