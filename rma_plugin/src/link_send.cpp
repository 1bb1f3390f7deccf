#include <poll.h>

#include <algorithm>

#include "link.h"

namespace moecomm::rma {
namespace {

constexpr int kFramesATurn = 16;  // per call of send(), so that one peer does not delay the others

}  // namespace

Link::Link(Descriptor socket, int peer, const std::shared_ptr<Gpu>& gpu, Shared& copies, const Registry& registry, Signals& signals,
           std::chrono::milliseconds patience)
    : socket_(std::move(socket)),
      peer_(peer),
      registry_(registry),
      signals_(signals),
      patience_(patience),
      heard_(Clock::now()),
      copies_out_(copies.out),
      staging_out_(gpu, kSlots * kMostPayload),
      copies_in_(copies.in),
      staging_in_(gpu, kSlots * kMostPayload) {}

void Link::push(Request& request, bool with_signal) {
    if (peer_left_) throw Failure(Fault::kPeerClosed, rank_name(peer_) + " has closed the communicator");
    if (unfinished() == 0) heard_ = Clock::now();
    ++request.held;
    outbox_.push_back({&request, with_signal, 0});
}

void Link::send() {
    for (int frames = 0; frames < kFramesATurn; ++frames) {
        stage();
        if (!writing_ && !choose()) return;
        if (!write()) return;
    }
}

void Link::stage() {
    for (;;) {
        copies_out_.ended(copies_out_.last());
        if (slots_out_.size() == kSlots || !copies_out_.room()) return;
        if (!stage_answer() && !stage_operation()) return;
    }
}

void Link::fill_slot(const Frame& frame, const char* from, bool on_gpu) {
    const size_t slot = next_slot_out_++ % kSlots;
    const Ticket ticket = copies_out_.copy(staging_out_.get() + slot * kMostPayload, from, frame.payload, on_gpu);
    slots_out_.push_back({frame, slot, ticket});
}

bool Link::stage_answer() {
    if (answers_.empty()) return false;
    Answer& next = answers_.front();
    Frame frame{};
    frame.type = FrameType::kData;
    frame.payload = static_cast<uint32_t>(std::min<uint64_t>(next.bytes - next.sent, kMostPayload));
    frame.offset = next.sent;
    frame.value = next.number;
    const char* from = nullptr;
    if (frame.payload > 0) {
        if (!next.region->registered) lied("gets from a region that is registered no more");
        from = next.region->base + next.offset + next.sent;
    }
    next.sent += frame.payload;
    const bool last = next.sent == next.bytes;
    if (last) frame.flags = kEndsOperation;
    fill_slot(frame, from, from != nullptr && next.region->on_gpu);
    if (last) {
        ++answered_by_us_;
        answers_.pop_front();
    }
    return true;
}

// Stage the next frame of the first operation; the operation leaves the outbox with its last frame.
bool Link::stage_operation() {
    if (outbox_.empty()) return false;
    Outgoing& next = outbox_.front();
    Request& request = *next.request;
    Frame frame{};
    if (request.kind == Request::Kind::kGet) {
        if (gets_.size() == kMostGets) return false;
        frame.type = FrameType::kGet;
        frame.region = request.remote->id;
        frame.offset = request.remote_at;
        frame.total = request.bytes;
        frame.value = gets_asked_++;
        gets_.push_back(&request);
        fill_slot(frame, nullptr, false);
        outbox_.pop_front();
        return true;
    }
    const bool signals = next.with_signal && request.signal != nullptr;
    const char* from = nullptr;
    bool last = true;
    if (next.sent < request.bytes || !signals) {
        frame.type = FrameType::kPut;
        frame.payload = static_cast<uint32_t>(std::min<uint64_t>(request.bytes - next.sent, kMostPayload));
        if (frame.payload > 0) {
            frame.region = request.remote->id;
            frame.offset = request.remote_at + next.sent;
            if (!request.local->registered) throw Failure(Fault::kBadHandle, "memory was given back while a put from it was under way");
            from = request.local->base + request.local_at + next.sent;
        }
        next.sent += frame.payload;
        last = next.sent == request.bytes && !signals;
    } else {
        frame.type = FrameType::kSignal;
        frame.region = request.signal->id;
        frame.offset = request.signal_at;
        frame.value = request.signal_value;
    }
    if (last) frame.flags = kEndsOperation;
    fill_slot(frame, from, from != nullptr && request.local->on_gpu);
    if (last) {
        if (signals) request.has_signalled();
        puts_.push_back(&request);
        outbox_.pop_front();
    }
    return true;
}

bool Link::choose() {
    writing_frame_ = {};
    writing_payload_ = nullptr;
    writing_slot_ = false;
    if (acked_ != applied_) {
        writing_frame_.type = FrameType::kAck;
        writing_frame_.value = acked_ = applied_;
    } else if (!slots_out_.empty()) {
        const SlotOut& front = slots_out_.front();
        if (!copies_out_.ended(front.ticket)) return false;
        writing_frame_ = front.frame;
        writing_payload_ = staging_out_.get() + front.slot * kMostPayload;
        writing_slot_ = true;
    } else if (bye_due_) {
        writing_frame_.type = FrameType::kBye;
        bye_due_ = false;
    } else {
        return false;
    }
    seal(writing_frame_, frames_out_++, writing_payload_);
    writing_ = true;
    written_ = 0;
    return true;
}

bool Link::write() {
    const size_t header = sizeof writing_frame_, all = header + writing_frame_.payload;
    while (written_ < all) {
        const size_t head = written_ < header ? header - written_ : 0;
        const size_t body = written_ < header ? 0 : written_ - header;
        const long sent = send_some(socket_.get(), reinterpret_cast<const char*>(&writing_frame_) + (header - head), head,
                                    writing_payload_ + body, writing_frame_.payload - body);
        if (sent < 0) return false;
        heard_ = Clock::now();  // the peer accepts data, so it is alive
        written_ += static_cast<size_t>(sent);
    }
    writing_ = false;
    const bool is_put = writing_frame_.type == FrameType::kPut || writing_frame_.type == FrameType::kSignal;
    if (is_put && (writing_frame_.flags & kEndsOperation) != 0) ++puts_sent_;
    if (writing_slot_) slots_out_.pop_front();
    return true;
}

void Link::check_patience(Clock::time_point now) {
    if (unfinished() == 0 && !writing_) {
        heard_ = now;
        return;
    }
    if (now - heard_ > patience_) {
        throw Failure(Fault::kPeerSilent, rank_name(peer_) + " has answered nothing for " + std::to_string(patience_.count()) +
                                              " ms, with " + std::to_string(unfinished()) + " operation(s) to be done");
    }
}

void Link::say_bye(Deadline deadline) {
    if (peer_left_) return;
    outbox_.clear();
    answers_.clear();
    bye_due_ = true;
    while (has_to_send()) {
        if (!writing_ && !choose()) {
            if (slots_out_.empty() || Clock::now() >= deadline) return;
            continue;  // a copy into a slot is under way
        }
        if (!write() && !wait_for(socket_.get(), POLLOUT, deadline)) return;
    }
}

}  // namespace moecomm::rma
