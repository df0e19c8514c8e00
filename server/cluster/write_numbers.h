// write_numbers.h: numbers for an owner's writes of rows, so that one which was given
// up comes to nothing once another was made.
//
// A write that got no answer in time may still lie in a socket, a pooler or a paused
// process of the database's, and be carried out whenever that goes on.  Whatever is
// written after it has a higher number, which its transaction leaves in the database;
// one with a lower number fails there (postgres_rows.h).  Writes of one partition share
// a number as long as all of them are answered.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_CLUSTER_WRITE_NUMBERS_H_
#define BELLWETHER_SERVER_CLUSTER_WRITE_NUMBERS_H_

#include <array>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/cluster/fence.h"
#include "server/model/partition.h"

namespace bellwether::server {

struct WriteNumber {
  uint64_t epoch = 0;
  uint64_t number = 0;
  bool is_known = false;  // The database has it already.

  bool operator==(const WriteNumber& other) const { return epoch == other.epoch && number == other.number; }
};

class WriteNumbers {
 public:
  // A partition was taken.  Its epochs rise, unless the database was set back.
  void Begin(const Fence& fence) {
    absl::MutexLock lock(&mutex_);
    WriteNumber& number = numbers_[fence.partition];
    if (number.epoch != fence.epoch) number = {fence.epoch, 1};
  }
  WriteNumber Of(const Fence& fence) {
    absl::MutexLock lock(&mutex_);
    return At(fence);
  }
  // A write with it was carried out.
  void Confirm(const Fence& fence, const WriteNumber& number) {
    absl::MutexLock lock(&mutex_);
    if (At(fence) == number) At(fence).is_known = true;
  }
  // What became of a write with it is not known: further ones get a higher one.
  void GiveUp(const Fence& fence, const WriteNumber& number) {
    absl::MutexLock lock(&mutex_);
    if (At(fence) == number) At(fence) = {number.epoch, number.number + 1};
  }

 private:
  WriteNumber& At(const Fence& fence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    WriteNumber& number = numbers_[fence.partition];
    if (number.epoch < fence.epoch) number = {fence.epoch, 1};
    return number;
  }

  absl::Mutex mutex_;
  std::array<WriteNumber, kPartitions> numbers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_WRITE_NUMBERS_H_
