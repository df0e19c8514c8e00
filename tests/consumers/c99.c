#include "bellwether/client.h"

int main(void) {
  bw_client_options options = {0};
  bw_client* client = 0;
  options.struct_size = sizeof(options);
  options.layers = 2;
  options.heads = 2;
  options.run = "consumer";
  options.record_path = "c99.bwrun";
  if (bw_client_push(NULL, NULL) != BW_INVALID_ARGUMENT) return 1;
  if (bw_signal_by_name("rows") == 0) return 2;
  if (bw_client_create(&options, &client) != BW_OK) return 3;
  if (bw_client_push_event(client, 1, 1, 0.5, "hello") != BW_OK) return 4;
  /* Finds the installed bellwether-sender by itself. */
  if (bw_client_flush(client, 20000) != BW_OK) return 5;
  bw_client_destroy(client);
  return 0;
}
