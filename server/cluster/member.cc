#include "server/cluster/member.h"

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/util/await_for.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr int64_t kAnswerMs = 3000;
// Between two tries to read what can wait.
constexpr int64_t kHistoryRetryNanos = 5'000'000'000;
// That take partitions up and let them go; each waits for the database in turn, so that
// several are as much sooner done.
constexpr int kWorkers = 4;
constexpr char kGone[] = "1970-01-01 00:00:00+00";
// Whoever locks several leases does so by their numbers, so that nobody waits for one
// who waits for him: one server renews its leases while it gives some back.
constexpr char kRenew[] =
    "UPDATE bellwether.lease SET until = now() + CAST($1 AS interval) "
    "WHERE p IN (SELECT p FROM bellwether.lease WHERE owner = $2 ORDER BY p FOR UPDATE)";

PgValue Seconds(int64_t seconds) { return absl::StrCat(seconds, " s"); }

}  // namespace

std::string NewOwnerName(const std::string& node) {
  std::string name = node;
  if (name.empty()) {
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    name = host;
  }
  std::random_device random;
  return absl::StrCat(name, "/", absl::Hex(static_cast<uint64_t>(random()) << 32 | random(), absl::kZeroPad16));
}

Member::Member(const ClusterOptions& options, uint32_t database, std::string owner, PartitionHost* host,
               Counters* counters, Clock* clock, AskHoldings ask, PgLink::Greet greet)
    : options_(options),
      first_(database * kPartitions),
      owner_(std::move(owner)),
      host_(host),
      clock_(clock),
      ask_(std::move(ask)),
      owned_(counters->gauge("bellwether_cluster_partitions")),
      up_(counters->gauge("bellwether_cluster_database_up", {{"database", absl::StrCat(database + 1)}})),
      taken_(counters->counter("bellwether_cluster_moves_total", {{"move", "taken"}})),
      lost_(counters->counter("bellwether_cluster_moves_total", {{"move", "lost"}})),
      released_(counters->counter("bellwether_cluster_moves_total", {{"move", "released"}})),
      lease_link_(options.dsns[database], kAnswerMs, std::move(greet)),
      release_link_(options.dsns[database], kAnswerMs) {}

absl::StatusOr<std::unique_ptr<Member>> Member::Open(const ClusterOptions& options, uint32_t database,
                                                     const std::string& owner, PartitionHost* host, Counters* counters,
                                                     Clock* clock, AskHoldings ask, PgLink::Greet greet) {
  std::unique_ptr<Member> member(
      new Member(options, database, owner, host, counters, clock, std::move(ask), std::move(greet)));
  if (database == 0) BW_RETURN_IF_ERROR(member->LearnKey());
  std::vector<uint32_t> free;
  int64_t servers = 1;
  absl::Status status = member->Renew();
  if (status.ok()) status = member->Look(&free, &servers);  // Who has what, and what time it is there.
  if (!status.ok() && !(database > 0 && absl::IsUnavailable(status))) return status;
  return member;
}

void Member::Begin() {
  giver_ = std::thread([this] { GiveBack(); });
  for (int i = 0; i < kWorkers; ++i) {
    workers_.emplace_back([this, i] { Work(/*history=*/i == 0); });
  }
  keeper_ = std::thread([this] { Keep(); });
}

Member::~Member() { Leave(); }

std::string Member::OwnerAddress(uint32_t partition) const {
  absl::MutexLock lock(&mutex_);
  return leases_[partition].state == State::kForeign ? leases_[partition].address : "";
}

void Member::LookSoon() {
  absl::MutexLock lock(&mutex_);
  look_soon_ = true;
}

Member::Spread Member::spread() const {
  std::set<std::string> others;
  Spread spread;
  absl::MutexLock lock(&mutex_);
  for (const PartitionLease& lease : leases_) {
    if (lease.state == State::kForeign && !lease.address.empty()) others.insert(lease.address);
    const bool moves = lease.state == State::kAcquiring || lease.state == State::kReleasing;
    if (moves || (lease.state != State::kOwned && lease.address.empty())) ++spread.unserved;
  }
  spread.others.assign(others.begin(), others.end());
  return spread;
}

bool Member::Serves(uint32_t partition) const {
  absl::MutexLock lock(&mutex_);
  return leases_[partition].state == State::kOwned;
}

std::vector<Holding> Member::holdings() const {
  std::vector<Holding> holdings;
  absl::MutexLock lock(&mutex_);
  for (uint32_t p = 0; p < kPartitions; ++p) {
    if (leases_[p].state == State::kOwned) holdings.push_back({first_ + p, leases_[p].epoch, ""});
  }
  return holdings;
}

absl::Status Member::LearnKey() {
  std::random_device random;
  std::string key;
  while (key.size() < 32) key.push_back(static_cast<char>(random()));
  BW_RETURN_IF_ERROR(
      lease_link_
          .Run({{"INSERT INTO bellwether.peer_key (one, key) VALUES (1, $1) ON CONFLICT (one) DO NOTHING",
                 {PgValue::Bytes(std::move(key))}}})
          .status());
  BW_ASSIGN_OR_RETURN(const auto known, lease_link_.Run({{"SELECT key FROM bellwether.peer_key WHERE one = 1", {}}}));
  if (known[0].rows() != 1 || known[0].Text(0, 0).size() < 32) {
    return absl::FailedPreconditionError("bellwether.peer_key holds no key of 32 bytes: delete its row");
  }
  peer_key_ = std::string(known[0].Text(0, 0));
  return absl::OkStatus();
}

absl::Status Member::Renew() {
  const std::string name = owner_.substr(0, owner_.rfind('/'));
  BW_RETURN_IF_ERROR(
      lease_link_
          .Run({{"INSERT INTO bellwether.servers (name, address, until) VALUES ($1, $2, now() + CAST($3 AS interval)) "
                 "ON CONFLICT (name) DO UPDATE SET address = excluded.address, until = excluded.until",
                 {name, options_.address, Seconds(options_.lease_seconds)}}})
          .status());
  BW_RETURN_IF_ERROR(lease_link_.Run({{kRenew, {Seconds(options_.lease_seconds), owner_}}}).status());
  renewed_ns_ = clock_->MonotonicNanos();
  return absl::OkStatus();
}

absl::Status Member::SendLeaving() {
  BW_RETURN_IF_ERROR(lease_link_
                         .Run({{"UPDATE bellwether.servers SET until = CAST($2 AS timestamptz) WHERE name = $1",
                                {owner_.substr(0, owner_.rfind('/')), std::string(kGone)}},
                               {kRenew, {Seconds(options_.lease_seconds), owner_}}})
                         .status());
  renewed_ns_ = clock_->MonotonicNanos();
  announced_ = true;
  return absl::OkStatus();
}

absl::Status Member::Look(std::vector<uint32_t>* free, int64_t* servers) {
  BW_ASSIGN_OR_RETURN(
      const auto seen,
      lease_link_.Run({{"SELECT p, owner, address, epoch, until < now() FROM bellwether.lease ORDER BY p", {}},
                       {"SELECT CAST(floor(extract(epoch FROM now()) * 1000) AS bigint)", {}},
                       {"SELECT address, until > now() FROM bellwether.servers", {}}}));
  database_offset_ns_ = seen[1].Number(0, 0) * 1'000'000 - clock_->MonotonicNanos();
  std::set<std::string, std::less<>> here, gone;  // Addresses; a name that was changed has left its old one.
  int64_t count = 0;
  for (int row = 0; row < seen[2].rows(); ++row) {
    const bool is_here = seen[2].Number(row, 1) != 0;
    count += is_here;
    (is_here ? here : gone).emplace(seen[2].Text(row, 0));
  }
  *servers = std::max<int64_t>(1, count);
  std::vector<uint32_t> lost;
  {
    absl::MutexLock lock(&mutex_);
    for (int row = 0; row < seen[0].rows(); ++row) {
      const auto p = static_cast<uint32_t>(seen[0].Number(row, 0));
      if (p >= kPartitions) continue;
      PartitionLease& lease = leases_[p];
      const bool mine = seen[0].Text(row, 1) == owner_;
      const bool expired = seen[0].Number(row, 4) != 0;
      const std::string_view address = seen[0].Text(row, 2);
      const bool leaves = gone.contains(address) && !here.contains(address);
      lease.address = mine || expired || leaves ? "" : std::string(address);
      if (lease.state == State::kOwned && lease.history_due_ns != 0 &&
          clock_->MonotonicNanos() >= lease.history_due_ns) {
        lease.history_due_ns = 0;
        tasks_.push_back({TaskKind::kLoadHistory, p, lease.epoch});
      }
      if (lease.state == State::kForeign) {
        if (expired) {
          free->push_back(p);
        } else if (mine) {
          // Taken, or not given back, while the database was going away: renewed
          // with the others, it would be nobody's to serve for ever.
          lease.state = State::kReleasing;
          lease.epoch = static_cast<uint64_t>(seen[0].Number(row, 3));
          tasks_.push_back({TaskKind::kRelease, p, lease.epoch});
        }
      } else if (!mine || static_cast<uint64_t>(seen[0].Number(row, 3)) != lease.epoch) {
        if (Lose(p)) lost.push_back(p);
      }
    }
    Show();
  }
  FenceLost(lost);
  return absl::OkStatus();
}

bool Member::Lose(uint32_t partition) {
  PartitionLease& lease = leases_[partition];
  if (lease.state == State::kReleasing) return false;  // It is on its way out.
  lease.state = State::kReleasing;
  tasks_.push_front({TaskKind::kDrop, partition, lease.epoch});
  lost_->Add();
  return true;
}

void Member::FenceLost(const std::vector<uint32_t>& lost) {
  for (const uint32_t p : lost) {
    LogWarning("the lease of partition {} is lost", first_ + p);
    host_->FencePartition(first_ + p);
  }
}

void Member::HearOthers() {
  std::vector<Holding> held = ask_(spread().others);
  std::sort(held.begin(), held.end(), [](const Holding& a, const Holding& b) { return a.epoch < b.epoch; });
  std::vector<uint32_t> lost;
  {
    absl::MutexLock lock(&mutex_);
    for (const Holding& holding : held) {
      if (holding.partition < first_ || holding.partition - first_ >= kPartitions) continue;
      const uint32_t p = holding.partition - first_;
      PartitionLease& lease = leases_[p];
      if (lease.state != State::kForeign && holding.epoch <= lease.epoch) continue;
      lease.address = holding.address;
      if (lease.state != State::kForeign && Lose(p)) lost.push_back(p);
    }
    Show();
  }
  FenceLost(lost);
}

int64_t Member::CountMine() const {
  return std::count_if(leases_.begin(), leases_.end(), [](const PartitionLease& lease) {
    return lease.state == State::kOwned || lease.state == State::kAcquiring;
  });
}

void Member::Show() {
  const int64_t mine = CountMine();
  owned_->Add(static_cast<double>(mine - std::exchange(shown_, mine)));
}

absl::Status Member::Take(std::vector<uint32_t> free, int64_t share) {
  // Who else wants some begins elsewhere.
  if (!free.empty()) {
    const size_t begin = std::hash<std::string>()(owner_) % free.size();
    std::rotate(free.begin(), free.begin() + static_cast<std::ptrdiff_t>(begin), free.end());
  }
  for (auto next = free.begin(); next != free.end();) {
    int64_t wanted = 0;
    {
      absl::MutexLock lock(&mutex_);
      wanted = leaving_ || announcing_ ? 0 : share - CountMine();
    }
    if (wanted <= 0) return absl::OkStatus();
    // In one commit, and in their order: two who want the same do not wait for each other.
    const auto end = next + std::min<std::ptrdiff_t>(wanted, free.end() - next);
    std::sort(next, end);
    std::vector<PgStatement> flight;
    for (auto p = next; p != end; ++p) {
      flight.push_back(
          {"UPDATE bellwether.lease SET owner = $1, address = $2, epoch = epoch + 1, "
           "until = now() + CAST($3 AS interval) WHERE p = $4 AND until < now() RETURNING epoch",
           {owner_, options_.address, Seconds(options_.lease_seconds), int64_t{*p}}});
    }
    BW_ASSIGN_OR_RETURN(const auto taken, lease_link_.Run(flight));
    absl::MutexLock lock(&mutex_);
    for (size_t i = 0; i < taken.size(); ++i, ++next) {
      if (taken[i].rows() == 0) continue;  // Another was quicker.
      PartitionLease& lease = leases_[*next];
      lease.state = State::kAcquiring;
      lease.epoch = static_cast<uint64_t>(taken[i].Number(0, 0));
      lease.address.clear();
      lease.history_due_ns = 0;
      tasks_.push_back({TaskKind::kAcquire, *next, lease.epoch});
    }
  }
  return absl::OkStatus();
}

void Member::GiveExcess(int64_t share) {
  absl::MutexLock lock(&mutex_);
  int64_t excess = CountMine() - share;
  for (uint32_t p = kPartitions; p-- > 0 && excess > 0;) {
    if (leases_[p].state != State::kOwned) continue;
    leases_[p].state = State::kReleasing;
    tasks_.push_back({TaskKind::kRelease, p, leases_[p].epoch});
    --excess;
  }
}

void Member::Keep() {
  const int64_t lease_ms = options_.lease_seconds * 1000;
  const int64_t look_ms = std::clamp<int64_t>(lease_ms / 20, 50, 500);
  const int64_t soon_ms = std::clamp<int64_t>(lease_ms / 200, 10, 50);
  bool complained = false;
  for (;;) {
    bool announcing = false;
    {
      absl::MutexLock lock(&mutex_);
      announcing = announcing_;
      look_soon_ = false;
    }
    absl::Status status;
    const bool due = clock_->MonotonicNanos() - renewed_ns_ >= lease_ms * 1'000'000 / 3;
    if (announcing && (due || !announced_)) {
      status = SendLeaving();
    } else if (due) {
      status = Renew();
    }
    std::vector<uint32_t> free;
    int64_t servers = 1;
    if (status.ok()) status = Look(&free, &servers);
    const int64_t share = (int64_t{kPartitions} + servers - 1) / servers;
    if (status.ok()) status = Take(std::move(free), share);
    if (status.ok() && !announcing) GiveExcess(share);
    if (!status.ok() && !complained) LogWarning("leases cannot be kept: {}", std::string(status.message()));
    up_->Set(status.ok() ? 1 : 0);
    complained = !status.ok();
    kept_ = status;
    if (!status.ok() && ask_ && clock_->MonotonicNanos() - renewed_ns_ > lease_ms * 1'000'000) HearOthers();
    absl::MutexLock lock(&mutex_);
    if (AwaitFor(&mutex_, absl::Condition(&leaving_), absl::Milliseconds(soon_ms))) return;
    const auto wake = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return leaving_ || look_soon_; };
    AwaitFor(&mutex_, absl::Condition(&wake), absl::Milliseconds(look_ms - soon_ms));
    if (leaving_) return;
  }
}

void Member::Work(bool history) {
  for (;;) {
    std::deque<PartitionTask>::iterator next;
    PartitionTask task;
    {
      absl::MutexLock lock(&mutex_);
      const auto wake = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        const auto find = [&](bool waits) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
          return std::find_if(tasks_.begin(), tasks_.end(), [&](const PartitionTask& each) {
            return (each.kind == TaskKind::kLoadHistory) == waits && !working_.contains(each.partition);
          });
        };
        next = find(false);
        if (next == tasks_.end() && history) next = find(true);
        return next != tasks_.end() || (stop_ && tasks_.empty());
      };
      mutex_.Await(absl::Condition(&wake));
      if (tasks_.empty()) return;
      task = *next;
      tasks_.erase(next);
      working_.insert(task.partition);
    }
    Do(task);
    absl::MutexLock lock(&mutex_);
    working_.erase(task.partition);
  }
}

void Member::GiveBack() {
  for (;;) {
    std::vector<Released> batch;
    {
      absl::MutexLock lock(&mutex_);
      giving_ = false;
      const auto wake = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return !released_now_.empty() || (stop_ && tasks_.empty() && working_.empty());
      };
      mutex_.Await(absl::Condition(&wake));
      if (released_now_.empty()) return;
      batch = std::exchange(released_now_, {});
      giving_ = true;
    }
    std::sort(batch.begin(), batch.end(),
              [](const Released& a, const Released& b) { return a.partition < b.partition; });
    std::vector<PgStatement> flight;
    for (const Released& each : batch) {
      flight.push_back(
          {"UPDATE bellwether.lease SET owner = '', address = '', until = CAST($5 AS timestamptz), "
           "keep = CASE WHEN keep < $4 THEN $4 ELSE keep END WHERE p = $1 AND owner = $2 AND epoch = $3",
           {int64_t{each.partition}, owner_, static_cast<int64_t>(each.epoch), static_cast<int64_t>(each.keep),
            std::string(kGone)}});
    }
    if (const absl::Status status = release_link_.Run(flight).status(); !status.ok()) {
      LogWarning("{} partitions are free once their leases have run out: {}", batch.size(),
                 std::string(status.message()));
    }
    absl::MutexLock lock(&mutex_);
    for (const Released& each : batch) leases_[each.partition].state = State::kForeign;
    Show();
  }
}

void Member::Do(const PartitionTask& task) {
  const uint32_t partition = first_ + task.partition;
  const auto is = [&](State state) {
    absl::MutexLock lock(&mutex_);
    return leases_[task.partition].state == state && leases_[task.partition].epoch == task.epoch;
  };
  const auto leave = [&] {
    absl::MutexLock lock(&mutex_);
    leases_[task.partition].state = State::kForeign;
    Show();
  };
  switch (task.kind) {
    case TaskKind::kAcquire: {
      if (!is(State::kAcquiring)) return;
      const int64_t began_ns = clock_->MonotonicNanos();
      const absl::Status taken = host_->AcquirePartition(partition, task.epoch);
      bool ours = false;
      {
        absl::MutexLock lock(&mutex_);
        PartitionLease& lease = leases_[task.partition];
        ours = lease.state == State::kAcquiring && lease.epoch == task.epoch;
        if (ours) lease.state = taken.ok() ? State::kOwned : State::kReleasing;
        if (ours && taken.ok()) tasks_.push_back({TaskKind::kLoadHistory, task.partition, task.epoch});
        Show();
      }
      if (taken.ok()) {
        taken_->Add();
        LogInfo("partition {} is served, epoch {}, after {} ms", partition, task.epoch,
                (clock_->MonotonicNanos() - began_ns) / 1'000'000);
        return;
      }
      LogError("partition {} cannot be taken up: {}", partition, std::string(taken.message()));
      if (ours) Release(task.partition, task.epoch, 0);  // Else its Drop is on its way.
      return;
    }
    case TaskKind::kLoadHistory:
      if (!is(State::kOwned)) return;
      // Whoever leaves gives it back without waiting for all of it.
      if (const absl::Status status = host_->LoadHistory(partition, [&] { return is(State::kOwned); });
          !status.ok() && !absl::IsCancelled(status)) {
        LogError("the older series of partition {} are not here, it is tried again: {}", partition,
                 std::string(status.message()));
        absl::MutexLock lock(&mutex_);
        leases_[task.partition].history_due_ns = clock_->MonotonicNanos() + kHistoryRetryNanos;
      }
      return;
    case TaskKind::kDrop:
      host_->ReleasePartition(partition, /*save=*/false);
      leave();
      return;
    case TaskKind::kRelease: {
      const Lsn keep = host_->ReleasePartition(partition, /*save=*/true);
      released_->Add();
      Release(task.partition, task.epoch, keep);
      return;
    }
  }
}

void Member::Release(uint32_t partition, uint64_t epoch, Lsn keep) {
  absl::MutexLock lock(&mutex_);
  released_now_.push_back({partition, epoch, keep});
}

void Member::Announce() {
  absl::MutexLock lock(&mutex_);
  announcing_ = look_soon_ = true;
}

void Member::Leave() {
  {
    absl::MutexLock lock(&mutex_);
    if (leaving_) return;
    leaving_ = true;
  }
  const bool begun = keeper_.joinable();
  if (begun) keeper_.join();
  if (!announced_) {
    // A database that did not answer the keeper does not delay what is to be saved.
    if (const absl::Status status = kept_.ok() ? SendLeaving() : kept_; !status.ok()) {
      LogWarning("the others take this server's share once its leases have run out: {}", std::string(status.message()));
    }
  }
  if (!begun) return;
  {
    absl::MutexLock lock(&mutex_);
    std::erase_if(tasks_, [](const PartitionTask& each) { return each.kind == TaskKind::kLoadHistory; });
    // What has not begun to be taken up is given back as it came.
    for (PartitionTask& task : tasks_) {
      PartitionLease& lease = leases_[task.partition];
      if (task.kind != TaskKind::kAcquire || lease.state != State::kAcquiring || lease.epoch != task.epoch) continue;
      task.kind = TaskKind::kRelease;
      lease.state = State::kReleasing;
    }
    const auto give_all = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      for (uint32_t p = 0; p < kPartitions; ++p) {
        if (leases_[p].state != State::kOwned) continue;
        leases_[p].state = State::kReleasing;
        tasks_.push_back({TaskKind::kRelease, p, leases_[p].epoch});
      }
    };
    give_all();
    const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return tasks_.empty() && working_.empty() && released_now_.empty() && !giving_;
    };
    mutex_.Await(absl::Condition(&idle));
    give_all();  // What was being taken up meanwhile.
    stop_ = true;
  }
  for (std::thread& worker : workers_) worker.join();
  giver_.join();
}

}  // namespace bellwether::server
