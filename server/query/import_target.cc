#include "server/query/import_target.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "bellwether/recording.h"
#include "server/query/convert.h"
#include "server/query/run_router.h"
#include "server/util/await_for.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// So often, and so far apart, an import asks who has the run's partition: 2 s.
constexpr int kOwnerLooks = 40;
constexpr absl::Duration kOwnerLook = absl::Milliseconds(50);

class ImportHere final : public ImportTarget {
 public:
  ImportHere(const QueryEngine& engine, const std::string& as_name, bool notify)
      : engine_(engine), import_(engine.stores().control->StartImport(as_name, notify)) {}

  absl::Status Feed(const std::string& bytes) override { return import_->Feed(bytes); }
  absl::StatusOr<v1::ImportRunResponse> Finish() override {
    BW_ASSIGN_OR_RETURN(const RunImport::Result result, import_->Finish());
    v1::ImportRunResponse response;
    response.set_frames(result.frames);
    response.set_events(result.events);
    if (const RunSnapshotPtr run = engine_.stores().runs->Get(result.run)) *response.mutable_run() = ToProto(*run);
    return response;
  }

 private:
  const QueryEngine& engine_;
  const std::unique_ptr<RunImport> import_;
};

class ImportAtOwner final : public ImportTarget {
 public:
  ImportAtOwner(std::shared_ptr<PeerUpload> upload, std::string as_name, bool notify)
      : upload_(std::move(upload)), as_name_(std::move(as_name)), notify_(notify) {}
  // Half a recording is the owner's to end, as when its own caller goes away.
  ~ImportAtOwner() override { upload_->Cancel(); }

  absl::Status Feed(const std::string& bytes) override {
    v1::ImportRunRequest request;
    request.set_as_name(std::exchange(as_name_, ""));   // With the first chunk,
    request.set_notify(std::exchange(notify_, false));  // both.
    request.set_chunk(bytes);
    return Told(upload_->Write(request.SerializeAsString()));
  }
  absl::StatusOr<v1::ImportRunResponse> Finish() override {
    const absl::StatusOr<std::string> finished = upload_->Finish();
    BW_RETURN_IF_ERROR(Told(finished.status()));
    const std::string& bytes = *finished;
    v1::ImportRunResponse response;
    if (!response.ParseFromString(bytes)) return absl::InternalError("another server's answer cannot be read");
    return response;
  }
  bool asks_others() const override { return true; }
  void Cancel() override { upload_->Cancel(); }

 private:
  static absl::Status Told(absl::Status status) {
    if (!absl::IsUnavailable(status)) return status;
    return absl::UnavailableError(
        absl::StrCat(std::string(status.message()), "; the same import again goes on where this one stopped"));
  }

  const std::shared_ptr<PeerUpload> upload_;
  std::string as_name_;
  bool notify_;
};

// Finds out which of the two it is.
class ImportInCluster final : public ImportTarget {
 public:
  ImportInCluster(const QueryEngine& engine, GrantPtr grant, std::string as_name, bool notify)
      : engine_(engine), grant_(std::move(grant)), as_name_(std::move(as_name)), notify_(notify) {}

  absl::Status Feed(const std::string& bytes) override {
    if (target_ != nullptr) return target_->Feed(bytes);
    kept_.push_back(bytes);
    kept_bytes_ += bytes.size();
    BW_ASSIGN_OR_RETURN(const bool known, FindTarget(bytes));
    if (!known) return absl::OkStatus();
    for (const std::string& each : std::exchange(kept_, {})) BW_RETURN_IF_ERROR(target_->Feed(each));
    return absl::OkStatus();
  }
  absl::StatusOr<v1::ImportRunResponse> Finish() override {
    if (target_ == nullptr) return absl::InvalidArgumentError("the recording is cut short: it has no hello");
    return target_->Finish();
  }
  bool asks_others() const override {
    absl::MutexLock lock(&mutex_);
    return target_ == nullptr || target_->asks_others();
  }
  void Cancel() override {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
    if (target_ != nullptr) target_->Cancel();
  }

 private:
  absl::StatusOr<bool> FindTarget(const std::string& bytes) {
    RunUuid uuid;
    bool known = !as_name_.empty();
    if (known) {
      uuid = UuidOfName(as_name_);
    } else {
      reader_.Feed(bytes);
      v1::RecordedMessage first;
      const RecordingReader::Result result = reader_.Next(&first);
      if (result == RecordingReader::Result::kNeedMore) {
        if (kept_bytes_ < kKeptBytesMax) return false;
        return absl::InvalidArgumentError(
            absl::StrCat("the recording has no hello in its first ", kKeptBytesMax, " bytes"));
      }
      const std::string& said = first.message().hello().run().uuid();
      known = result == RecordingReader::Result::kMessage && said.size() == uuid.size();
      if (known) std::copy(said.begin(), said.end(), uuid.begin());
    }
    Peers& peers = engine_.stores().router->peers();
    // What is no recording is refused here, in the words of a server alone.
    Peers::Owner owner = known ? peers.OwnerOf(uuid) : Peers::Owner{.here = true, .address = ""};
    // Whose partition moved a moment ago is known within the next look at the leases.
    for (int i = 0; i < kOwnerLooks && !owner.here && owner.address.empty(); ++i) {
      absl::MutexLock lock(&mutex_);
      if (AwaitFor(&mutex_, absl::Condition(&cancelled_), kOwnerLook)) break;
      owner = peers.OwnerOf(uuid);
    }
    if (!owner.here && owner.address.empty()) {
      return absl::UnavailableError("the run's partition is being taken over; come back in a moment");
    }
    std::unique_ptr<ImportTarget> target;
    if (owner.here) {
      target = std::make_unique<ImportHere>(engine_, as_name_, notify_);
    } else {
      BW_ASSIGN_OR_RETURN(std::shared_ptr<PeerUpload> upload,
                          peers.Upload(owner.address, "ImportRun", grant_->PassOn("ImportRun")));
      target = std::make_unique<ImportAtOwner>(std::move(upload), as_name_, notify_);
    }
    absl::MutexLock lock(&mutex_);
    if (cancelled_) return absl::CancelledError("the caller went away");
    target_ = std::move(target);
    return true;
  }

  const QueryEngine& engine_;
  const GrantPtr grant_;
  const std::string as_name_;
  const bool notify_;
  RecordingReader reader_;
  std::vector<std::string> kept_;
  size_t kept_bytes_ = 0;
  mutable absl::Mutex mutex_;
  std::unique_ptr<ImportTarget> target_;  // Set once, by the feeding thread, under the mutex.
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

std::unique_ptr<ImportTarget> OpenImport(const QueryEngine& engine, GrantPtr grant, const std::string& as_name,
                                         bool notify) {
  // What was passed on is never passed on again.
  if (engine.stores().router == nullptr || grant == nullptr || grant->passed_on()) {
    return std::make_unique<ImportHere>(engine, as_name, notify);
  }
  return std::make_unique<ImportInCluster>(engine, std::move(grant), as_name, notify);
}

}  // namespace bellwether::server
