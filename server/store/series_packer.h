// series_packer.h: turns stored windows into chunks, in the background.
//
// A window holds a few steps of many heads, so that a run needs little memory.
// A chunk holds many steps of a few heads, so that a series is read quickly and
// stays small.  The packer's thread rewrites the one into the other, in one
// batch per signal: a reader's snapshot sees a step in one of them, never in
// none.  All of its input is in the database, so a crash costs nothing.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_STORE_SERIES_PACKER_H_
#define BELLWETHER_SERVER_STORE_SERIES_PACKER_H_

#include <cstdint>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/store/rocks_database.h"

namespace bellwether::server {

class SeriesPacker {
 public:
  struct Options {
    size_t chunk_steps = 256;
    int zstd_level = 1;
  };
  static constexpr int kAllSignals = -1;

  SeriesPacker(const Options& options, RocksDatabase* database);
  ~SeriesPacker();  // What is asked for and not done is done when asked again.

  // Looks at the signal's windows soon.  `finish`: packs what is left too,
  // though it makes a short chunk.
  void Request(RunId run, int signal, bool finish);
  // Waits until everything requested so far is done.
  void Drain();

 private:
  void Work();
  absl::Status Pack(RunId run, int signal, bool finish);
  absl::Status PackSignal(RunId run, uint16_t signal, bool finish);

  const Options options_;
  RocksDatabase* const database_;
  absl::Mutex mutex_;
  std::map<std::pair<RunId, int>, bool> requests_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_SERIES_PACKER_H_
