#include "transport/ucx_worker.h"

#include <cstdlib>
#include <stdexcept>

namespace smp {
namespace {

constexpr unsigned kMessageId = 7;

// UCX calls back with one pointer: the worker (for OnComplete) and the operation travel in this.
struct Pending {
  UcxEvents* events;
  uint64_t operation;
};

void Check(ucs_status_t status, const char* what) {
  if (status != UCS_OK) {
    throw std::runtime_error(std::string(what) + " failed: " + ucs_status_string(status));
  }
}

// The user's own UCX_<name> wins.
void Configure(ucp_config_t* config, const char* name, const std::string& value) {
  if (std::getenv((std::string("UCX_") + name).c_str()) != nullptr) return;
  Check(ucp_config_modify(config, name, value.c_str()),
        (std::string("setting UCX_") + name).c_str());
}

// An nbx call that returns null has completed and does not call back.
ucs_status_t Started(ucs_status_ptr_t request) {
  if (request == nullptr) return UCS_OK;
  return UCS_PTR_IS_ERR(request) ? UCS_PTR_STATUS(request) : UCS_INPROGRESS;
}

}  // namespace

UcxWorker::UcxWorker(uint32_t size, const UcxOptions& options, UcxEvents* events)
    : events_(events), peers_(size) {
  ucp_config_t* config = nullptr;
  Check(ucp_config_read(nullptr, nullptr, &config), "reading the UCX configuration");
  try {
    // Peer error handling takes shared memory away unless it is told to cope with it; of System V's
    // for who asks for that.
    Configure(config, "POSIX_ERROR_HANDLING", "y");
    Configure(config, "SYSV_ERROR_HANDLING", "y");
    Configure(config, "KEEPALIVE_INTERVAL", "2s");
    // Shared memory by files alone, which are this user's: segments of System V are made for all of
    // the user's group to write to.
    Configure(config, "TLS", options.single_host ? "posix,cma,self" : "^sysv");
    if (!options.single_host && !options.network_devices.empty()) {
      Configure(config, "NET_DEVICES", options.network_devices);
    }
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
    params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
    params.name = "smp_tf";
    Check(ucp_init(&params, config, &context_), "opening UCX");
  } catch (...) {
    ucp_config_release(config);
    throw;
  }
  ucp_config_release(config);

  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_EVENTS;
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  worker_params.events = UCP_WAKEUP_RX | UCP_WAKEUP_TX;
  Check(ucp_worker_create(context_, &worker_params, &worker_), "opening a UCX worker");
  Check(ucp_worker_get_efd(worker_, &event_fd_), "asking UCX for its event descriptor");

  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kMessageId;
  handler.cb = &UcxWorker::HandleMessage;
  handler.arg = this;
  Check(ucp_worker_set_am_recv_handler(worker_, &handler), "registering for messages");

  ucp_address_t* address = nullptr;
  size_t bytes = 0;
  Check(ucp_worker_get_address(worker_, &address, &bytes), "asking UCX for its address");
  address_.assign(reinterpret_cast<const char*>(address), bytes);
  ucp_worker_release_address(worker_, address);
}

UcxWorker::~UcxWorker() {
  // Forced: a peer may be gone, and nobody waits for answers any more.
  std::vector<ucs_status_ptr_t> closing;
  for (Peer& peer : peers_) {
    if (peer.ep == nullptr) continue;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    ucs_status_ptr_t request = ucp_ep_close_nbx(peer.ep, &param);
    peer.ep = nullptr;
    if (UCS_PTR_IS_PTR(request)) closing.push_back(request);
  }
  for (ucs_status_ptr_t request : closing) {
    for (int i = 0; i < 100000 && ucp_request_check_status(request) == UCS_INPROGRESS; ++i) {
      ucp_worker_progress(worker_);
    }
    ucp_request_free(request);
  }
  if (worker_ != nullptr) ucp_worker_destroy(worker_);
  if (context_ != nullptr) ucp_cleanup(context_);
}

void UcxWorker::Connect(uint32_t peer, const std::string& address, bool is_self) {
  peers_[peer].owner = this;
  peers_[peer].rank = peer;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  if (!is_self) {
    params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = &UcxWorker::HandleError;
    params.err_handler.arg = &peers_[peer];
  }
  Check(ucp_ep_create(worker_, &params, &peers_[peer].ep), "connecting to a peer");
}

ucs_status_t UcxWorker::Send(uint32_t peer, const std::string& header, const void* data,
                             size_t bytes, bool control, uint64_t operation) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                       UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = &UcxWorker::HandleSent;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  param.flags = (control || bytes <= kEagerBytes ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV) |
                UCP_AM_SEND_FLAG_COPY_HEADER;
  auto* pending = new Pending{events_, operation};
  param.user_data = pending;
  const ucs_status_t status = Started(ucp_am_send_nbx(peers_[peer].ep, kMessageId, header.data(),
                                                      header.size(), data, bytes, &param));
  if (status != UCS_INPROGRESS) delete pending;
  return status;
}

ucs_status_t UcxWorker::FetchRendezvous(void* descriptor, void* data, size_t bytes,
                                        uint64_t operation) {
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.recv_am = &UcxWorker::HandleFetched;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  auto* pending = new Pending{events_, operation};
  param.user_data = pending;
  const ucs_status_t status =
      Started(ucp_am_recv_data_nbx(worker_, descriptor, data, bytes, &param));
  if (status != UCS_INPROGRESS) delete pending;
  return status;
}

void UcxWorker::Drop(void* descriptor) { ucp_am_data_release(worker_, descriptor); }

ucs_status_t UcxWorker::HandleMessage(void* arg, const void* header, size_t header_bytes,
                                      void* data, size_t bytes, const ucp_am_recv_param_t* param) {
  auto* self = static_cast<UcxWorker*>(arg);
  const bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  const bool kept = self->events_->OnMessage(header, header_bytes, data, bytes, rendezvous);
  return kept ? UCS_INPROGRESS : UCS_OK;
}

void UcxWorker::HandleError(void* arg, ucp_ep_h, ucs_status_t status) {
  auto* peer = static_cast<Peer*>(arg);
  peer->owner->events_->OnPeerError(peer->rank, ucs_status_string(status));
}

void UcxWorker::HandleSent(void* request, ucs_status_t status, void* user_data) {
  std::unique_ptr<Pending> pending(static_cast<Pending*>(user_data));
  ucp_request_free(request);
  pending->events->OnComplete(pending->operation, status);
}

void UcxWorker::HandleFetched(void* request, ucs_status_t status, size_t, void* user_data) {
  HandleSent(request, status, user_data);
}

std::string UcxWorker::Lanes(uint32_t peer) const {
  if (!IsConnected(peer)) return "";
  ucp_transport_entry_t entries[16];
  ucp_ep_attr_t attr{};
  attr.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attr.transports.entries = entries;
  attr.transports.num_entries = 16;
  attr.transports.entry_size = sizeof(entries[0]);
  if (ucp_ep_query(peers_[peer].ep, &attr) != UCS_OK) return "";
  std::string names;
  for (unsigned i = 0; i < attr.transports.num_entries; ++i) {
    if (!names.empty()) names += ",";
    names += entries[i].transport_name;
  }
  return names;
}

}  // namespace smp
