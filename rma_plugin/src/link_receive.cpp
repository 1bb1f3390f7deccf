#include "link.h"

namespace moecomm::rma {
namespace {

constexpr int kFramesATurn = 16;

}  // namespace

void Link::lied(const std::string& what) const { throw Failure(Fault::kPeerLied, rank_name(peer_) + " " + what); }

void Link::receive() {
    settle();
    for (int frames = 0; frames < kFramesATurn && !peer_left_; ++frames) {
        while (header_got_ < sizeof incoming_) {
            const long got = receive_some(socket_.get(), reinterpret_cast<char*>(&incoming_) + header_got_, sizeof incoming_ - header_got_);
            if (got < 0) return;
            if (got == 0) throw Failure(Fault::kPeerLost, "the connection to " + rank_name(peer_) + " was closed");
            heard_ = Clock::now();
            header_got_ += static_cast<size_t>(got);
            if (header_got_ == sizeof incoming_) take_header();
        }
        if (!take_payload()) return;
        accept_frame();
        header_got_ = payload_got_ = 0;
        target_.reset();
        settle();
    }
}

// Validate all that the frame claims before any byte of its payload is read.
void Link::take_header() {
    const Frame& frame = incoming_;
    check_header(frame, frames_in_++, peer_);
    destination_ = nullptr;
    switch (frame.type) {
        case FrameType::kPut:
            if (frame.payload == 0) break;
            target_ = registry_.by_id(frame.region);
            if (target_ == nullptr) lied("puts into a region that is not registered");
            if (!fits(frame.offset, frame.payload, target_->bytes)) lied("puts beyond the end of a region");
            destination_ = target_->base + frame.offset;
            break;
        case FrameType::kData: {
            const uint64_t open = gets_answered_ - gets_done_;  // their data has come and is not in place yet
            if (open >= gets_.size() || frame.value != gets_answered_) lied("sends data that nobody asked for");
            const Request& get = *gets_[open];
            if (frame.offset != get_received_ || frame.payload > get.bytes - get_received_) lied("sends other data than was asked for");
            get_received_ += frame.payload;
            const bool last = (frame.flags & kEndsOperation) != 0;
            if (last != (get_received_ == get.bytes)) lied("sends more or less data than was asked for");
            if (last) {
                ++gets_answered_;
                get_received_ = 0;
            }
            target_ = get.local;
            if (frame.payload > 0) destination_ = get.local->base + get.local_at + frame.offset;
            break;
        }
        case FrameType::kGet:
            target_ = registry_.by_id(frame.region);
            if (frame.total > 0 && target_ == nullptr) lied("gets from a region that is not registered");
            if (frame.total > 0 && !fits(frame.offset, frame.total, target_->bytes)) lied("gets beyond the end of a region");
            if (frame.value != asked_of_us_++) lied("numbers its gets wrongly");
            if (asked_of_us_ - answered_by_us_ > 2 * kMostGets) lied("gets more at once than was agreed");
            break;
        case FrameType::kSignal:
        case FrameType::kAck:
        case FrameType::kBye:
            break;
    }
}

bool Link::take_payload() {
    copies_in_.ended(copies_in_.last());
    if (arrived_.size() >= kMostArrived || !copies_in_.room() || !signals_.room()) return false;
    if (incoming_.payload == 0) return true;
    const size_t slot = next_slot_in_ % kSlots;
    if (!copies_in_.ended(slot_in_[slot])) return false;
    char* to = staging_in_.get() + slot * kMostPayload;
    while (payload_got_ < incoming_.payload) {
        const long got = receive_some(socket_.get(), to + payload_got_, incoming_.payload - payload_got_);
        if (got < 0) return false;
        if (got == 0) throw Failure(Fault::kPeerLost, "the connection to " + rank_name(peer_) + " was closed");
        heard_ = Clock::now();
        payload_got_ += static_cast<size_t>(got);
    }
    check_payload(incoming_, to, peer_);
    if (!target_->registered) lied("writes to a region that is registered no more");
    slot_in_[slot] = copies_in_.copy(destination_, to, incoming_.payload, target_->on_gpu);
    ++next_slot_in_;
    return true;
}

// Frames whose effect must not be visible before the copies of earlier frames have ended wait in arrived_.
void Link::accept_frame() {
    if (incoming_.type == FrameType::kAck) return take_ack(incoming_.value);
    if (incoming_.type == FrameType::kBye) {
        peer_left_ = true;
        return;
    }
    arrived_.push_back({incoming_, target_, copies_in_.last()});
}

void Link::settle() {
    while (!arrived_.empty() && copies_in_.ended(arrived_.front().ticket)) {
        settle_one(arrived_.front());
        arrived_.pop_front();
    }
}

void Link::settle_one(Arrived& arrived) {
    const Frame& frame = arrived.frame;
    switch (frame.type) {
        case FrameType::kSignal:
            signals_.add(frame.region, frame.offset, frame.value, peer_);
            break;
        case FrameType::kGet:
            answers_.push_back({arrived.region, frame.offset, frame.total, frame.value, 0});
            return;
        case FrameType::kData:
            if ((frame.flags & kEndsOperation) == 0) return;
            gets_.front()->has_moved();
            --gets_.front()->held;
            gets_.pop_front();
            ++gets_done_;
            return;
        default:
            break;
    }
    if ((frame.flags & kEndsOperation) != 0) ++applied_;
}

void Link::take_ack(uint64_t operations) {
    if (operations > puts_sent_ || operations < puts_done_) lied("confirms operations that it can't have seen");
    for (; puts_done_ < operations; ++puts_done_) {
        puts_.front()->has_moved();
        --puts_.front()->held;
        puts_.pop_front();
    }
}

}  // namespace moecomm::rma
