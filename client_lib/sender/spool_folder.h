// spool_folder.h: the folder of one sender's spool, and those that earlier ones
// left.
//
// The user names a parent; each client of a (run, rank) has a folder of its own
// in it, UUID-RANK-NUMBER with rising numbers, mode 0700, files 0600:
//   lock      held (flock) by the sender that uses the folder
//   hello     the Hello of its attempt
//   state     how far it was acknowledged; written on the way, so that it is
//             right within one round of the sender after any kill
//   *.spool   what went to disk because the memory was half full
//   *.window  what was still in the memory when the sender gave up
// A folder without a lock belongs to a sender that is gone.
//
// Not thread-safe.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_SPOOL_FOLDER_H_
#define BELLWETHER_CLIENT_LIB_SENDER_SPOOL_FOLDER_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bellwether/v1/ingest.pb.h"
#include "client_lib/src/shared_memory.h"

namespace bellwether::client {

class SpoolFolder {
 public:
  enum class Result { kOk, kBusy, kError };
  static constexpr std::chrono::hours kKeptFor{7 * 24};

  // Whose spool: the run and the rank of `config`, under its spool_dir.
  static std::string Prefix(const SenderConfig& config);
  // Makes a new folder, and its parent where only that is missing.
  static Result Make(const SenderConfig& config, std::unique_ptr<SpoolFolder>* folder, std::string* error);
  // kBusy: another sender has it.  kError with an empty *error: it is not there.
  static Result Take(const SenderConfig& config, uint64_t number, std::unique_ptr<SpoolFolder>* folder,
                     std::string* error);
  // Numbers below `below` of the same run and rank, oldest first.
  static std::vector<uint64_t> Older(const SenderConfig& config, uint64_t below);
  // Deletes the folders of other runs and ranks of this user that are not
  // locked and were not written to for kKeptFor; returns how many had frames in
  // them.
  static int RemoveForsaken(const SenderConfig& config);
  // Of everything in that folder; 0 if it is not there.
  static uint64_t BytesOf(const SenderConfig& config, uint64_t number);

  ~SpoolFolder();
  SpoolFolder(const SpoolFolder&) = delete;
  SpoolFolder& operator=(const SpoolFolder&) = delete;

  const std::string& path() const { return path_; }
  uint64_t number() const { return number_; }
  // It was not written to for kKeptFor.
  bool IsOld() const { return IsOld(path_); }

  bool SaveHello(const v1::ClientMessage& hello);
  std::optional<v1::ClientMessage> LoadHello() const;
  // False with errno.  Writes nothing if nothing has changed.
  bool SaveState(const SenderState& state);
  // Fields that are not saved are 0; false if no state is whole.
  bool LoadState(SenderState* state) const;
  // Nothing is on disk any more: the saved state is obsolete.
  void DropState();

  // Deletes it with everything in it.
  void Remove();

 private:
  // What a later sender needs of SenderState.
  struct Saved;

  SpoolFolder(std::string path, uint64_t number) : path_(std::move(path)), number_(number) {}
  static bool IsOld(const std::string& path);
  Result Lock(std::string* error);

  const std::string path_;
  const uint64_t number_;
  int lock_fd_ = -1;
  int state_fd_ = -1;
  std::string saved_;
};

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_SPOOL_FOLDER_H_
