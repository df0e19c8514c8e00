#include "server/export/metrics_catalog.h"

#include <algorithm>

namespace bellwether::server {
namespace {

constexpr MetricKind kCounter = MetricKind::kCounter;
constexpr MetricKind kGauge = MetricKind::kGauge;
constexpr MetricKind kHistogram = MetricKind::kHistogram;

// Sorted by name: FindCatalogMetric() halves, and a diff shows one line.
constexpr CatalogMetric kCatalog[] = {
    {"bellwether_access_refused_total", kCounter, "Callers and calls that were refused, by why.", {"reason"}},
    {"bellwether_ack_seconds", kHistogram, "From a frame's arrival to its durable acknowledgement.", {}},
    {"bellwether_action_results_total",
     kCounter,
     "Trainers' answers to actions, by whether they were waited for.",
     {"result"}},
    {"bellwether_actions_total",
     kCounter,
     "Changes of actions' states, and requests about them that were refused.",
     {"kind", "result"}},
    {"bellwether_alert_active",
     kGauge,
     "1 for every alert that fires now.",
     {"run", "rule", "severity", "layer", "head"}},
    {"bellwether_alert_seconds", kHistogram, "From a frame's arrival to the transition that it caused.", {}},
    {"bellwether_alert_transitions_total", kCounter, "Changes of alerts' states.", {"rule", "to"}},
    {"bellwether_audit_failures_total", kCounter, "Lines that could not be written to the audit log.", {}},
    {"bellwether_audit_suppressed_total", kCounter, "Refusals that were too many for the audit log.", {}},
    {"bellwether_baseline_limit_refused_total",
     kCounter,
     "Healthy runs that a limit kept out of, or pushed out of, the baselines.",
     {"limit"}},
    {"bellwether_baseline_runs", kGauge, "Healthy runs that later ones are held against.", {}},
    {"bellwether_baseline_runs_total",
     kCounter,
     "Ended runs that were looked at for the baselines, by what came of it.",
     {"result"}},
    {"bellwether_build_info", kGauge, "Always 1; the labels say what runs.", {"version", "revision", "cuda"}},
    {"bellwether_cluster_calls_total",
     kCounter,
     "Calls of other servers of a cluster, by whether they answered.",
     {"result"}},
    {"bellwether_cluster_moves_total",
     kCounter,
     "Partitions that came to this server of a cluster, or left it.",
     {"move"}},
    {"bellwether_cluster_partitions", kGauge, "Partitions of a cluster that this server owns.", {}},
    {"bellwether_config_last_reload_success_timestamp_seconds", kGauge, "When the rules were last read.", {}},
    {"bellwether_config_last_reload_successful",
     kGauge,
     "1 unless the rules file was refused when it was last read.",
     {}},
    {"bellwether_connections", kGauge, "Open gRPC connections.", {}},
    {"bellwether_connections_refused_total",
     kCounter,
     "Connections closed at once, or left waiting, by the limit.",
     {"limit"}},
    {"bellwether_console_streams", kGauge, "Open event streams of the console.", {}},
    {"bellwether_degraded", kGauge, "1 while the server does less than it should, by reason.", {"reason"}},
    {"bellwether_detector_tick_seconds",
     kHistogram,
     "Evaluating all tests of a run's heads at the end of a batch.",
     {"backend"}},
    {"bellwether_http_requests_total", kCounter, "HTTP requests answered.", {"path", "code"}},
    {"bellwether_ingest_bytes_total", kCounter, "Bytes of frames that were accepted.", {}},
    {"bellwether_ingest_frames_total", kCounter, "Frames that arrived, by what became of them.", {"result"}},
    {"bellwether_ingest_limit_refused_total", kCounter, "Messages and streams refused by a limit.", {"limit"}},
    {"bellwether_ingest_seq_gaps_total", kCounter, "Jumps in the sequence numbers of a client.", {}},
    {"bellwether_ingest_streams", kGauge, "Open streams of trainers.", {}},
    {"bellwether_ingest_values_total", kCounter, "Values that were accepted.", {}},
    {"bellwether_notification_seconds", kHistogram, "From a transition to its delivery.", {"channel"}},
    {"bellwether_notifications_total", kCounter, "Notifications by what became of them.", {"channel", "result"}},
    {"bellwether_query_limit_refused_total", kCounter, "Queries refused by a limit.", {"limit"}},
    {"bellwether_query_seconds", kHistogram, "Time of a query.", {"method"}},
    {"bellwether_quota_refused_total",
     kCounter,
     "Streams refused, and messages that made a tenant wait, by his quota.",
     {"quota"}},
    {"bellwether_retention_failures_total", kCounter, "Runs whose old rows could not be made smaller.", {}},
    {"bellwether_retention_freed_bytes_total",
     kCounter,
     "Bytes of rows that were made smaller or deleted for their age.",
     {}},
    {"bellwether_retention_last_pass_timestamp_seconds",
     kGauge,
     "When all runs were last looked at for what is old.",
     {}},
    {"bellwether_retention_rows_total",
     kCounter,
     "Rows of series that age made smaller or deleted, by what became of them.",
     {"result"}},
    {"bellwether_run_attempt", kGauge, "How often the run was restarted.", {"run"}},
    {"bellwether_run_ended", kGauge, "1 once the run has said goodbye.", {"run"}},
    {"bellwether_run_eta_lower_steps", kGauge, "Steps to the predicted divergence, lower end of 80 %.", {"run"}},
    {"bellwether_run_eta_steps", kGauge, "Steps to the predicted divergence; absent without a prediction.", {"run"}},
    {"bellwether_run_eta_upper_steps", kGauge, "Steps to the predicted divergence, upper end of 80 %.", {"run"}},
    {"bellwether_run_frames_dropped_total",
     kCounter,
     "Frames that never arrived, by where they were lost.",
     {"run", "reason"}},
    {"bellwether_run_info",
     kGauge,
     "Always 1; the labels describe the run.",
     {"run", "framework", "model", "attention", "score_dtype", "layers", "heads", "world"}},
    {"bellwether_run_last_report_timestamp_seconds", kGauge, "When the run was last heard of.", {"run"}},
    {"bellwether_run_ranks_expected", kGauge, "Ranks that should report.", {"run"}},
    {"bellwether_run_ranks_reporting", kGauge, "Ranks that do report.", {"run"}},
    {"bellwether_run_save_failures_total",
     kCounter,
     "Tries to save a run that failed; what is not saved stays in the log.",
     {}},
    {"bellwether_run_stage", kGauge, "0 healthy, 1 drift, 2 ties and bias, 3 norm, 4 logits, 5 loss.", {"run"}},
    {"bellwether_run_step", kGauge, "The newest closed step.", {"run"}},
    {"bellwether_series_exported", kGauge, "Series of this page.", {"level"}},
    {"bellwether_series_suppressed_total",
     kCounter,
     "Series left out of this page for the limit, added up over scrapes.",
     {"level"}},
    {"bellwether_shard_queue_frames", kGauge, "Frames that wait for a shard.", {"shard"}},
    {"bellwether_spectra_queue_bytes", kGauge, "Bytes of Gram matrices that wait for the spectra's thread.", {}},
    {"bellwether_spectra_seconds", kHistogram, "Making the signals of one batch of Gram matrices.", {"backend"}},
    {"bellwether_spectra_total",
     kCounter,
     "Gram matrices, or pairs of them, that clients shipped, by what became of them.",
     {"result"}},
    {"bellwether_steps_closed_by_deadline_total", kCounter, "Steps closed before every rank had reported.", {}},
    {"bellwether_store_bytes", kGauge, "Bytes on disk.", {"kind"}},
    {"bellwether_store_free_bytes", kGauge, "Free bytes of the data directory's file system.", {}},
    {"bellwether_tls_certificate_expiry_timestamp_seconds",
     kGauge,
     "When the server's certificate, or what signed it, expires.",
     {}},
    {"bellwether_tls_reloads_total",
     kCounter,
     "Changes of the certificate's files, by what became of them.",
     {"result"}},
    {"bellwether_wal_bytes", kGauge, "Bytes of the write-ahead log.", {}},
    {"bellwether_wal_fsync_seconds", kHistogram, "Time of one fdatasync of the write-ahead log.", {}},
    {"bellwether_wal_unapplied_frames", kGauge, "Records of the log that are still to be applied after a start.", {}},
    {"grpc_server_handled_total",
     kCounter,
     "RPCs that ended.",
     {"grpc_type", "grpc_service", "grpc_method", "grpc_code"}},
    {"grpc_server_handling_seconds", kHistogram, "Time of an RPC.", {"grpc_type", "grpc_service", "grpc_method"}},
    {"process_cpu_seconds_total", kCounter, "User and system time of the process.", {}},
    {"process_max_fds", kGauge, "Limit of open file descriptors.", {}},
    {"process_open_fds", kGauge, "Open file descriptors.", {}},
    {"process_resident_memory_bytes", kGauge, "Resident memory.", {}},
    {"process_start_time_seconds", kGauge, "When the process began.", {}},
    {"process_threads", kGauge, "Threads of the process.", {}},
    {"process_virtual_memory_bytes", kGauge, "Virtual memory.", {}},
};

}  // namespace

bool CatalogMetric::HasLabel(std::string_view label) const {
  return !label.empty() && std::find(labels.begin(), labels.end(), label) != labels.end();
}

size_t CatalogMetric::label_count() const {
  return static_cast<size_t>(
      std::count_if(labels.begin(), labels.end(), [](std::string_view l) { return !l.empty(); }));
}

std::span<const CatalogMetric> MetricsCatalog() { return kCatalog; }

const CatalogMetric* FindCatalogMetric(std::string_view name) {
  const auto* const found =
      std::lower_bound(std::begin(kCatalog), std::end(kCatalog), name,
                       [](const CatalogMetric& metric, std::string_view wanted) { return metric.name < wanted; });
  return found == std::end(kCatalog) || found->name != name ? nullptr : found;
}

}  // namespace bellwether::server
