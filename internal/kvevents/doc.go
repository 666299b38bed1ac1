// Package kvevents is what inference engines publish about their KV caches:
// which blocks of which token prefixes they hold, in which tier. It reads the
// event batches of vLLM and SGLang in all their shapes, writes vLLM's, follows
// a publisher over ZMQ (Feed) and is one (Publisher).
//
// A publisher sends three frames: a topic, a sequence number (8 bytes, big
// endian, from 0 at each start), and a batch in msgpack: [time, events, rank].
// PUB sockets lose messages without a word, so a Feed watches the sequence and
// asks the publisher's replay socket for what it missed; what nobody can tell
// it any more makes it forget all it knew.
//
// Engines name blocks by hashes that mean nothing to others: vLLM's are seeded
// at random by default. They are kept as opaque names within one publisher;
// the prefix that a block stands for is known from its parent and its token
// ids.
//
// Engines authenticate nobody and are not authenticated, and nothing more than a
// choice of worker may depend on what they publish. Our own publishers ask for
// the fleet's secret (PublisherConfig.Ring): prompts' token ids are in what they
// say. Both ends then derive Curve25519 private keys from it, trust.Secret.Key
// with trust.Events for "publisher" and "subscriber", and speak ZMTP's CURVE. A
// publisher has one key for each secret in force and knows one client of each.
//
// The msgpack is read and written by tinylib/msgp, whose functions on byte slices
// need no generated code. What they leave to the caller is here: a list or map may
// claim no more elements than there are bytes, before room is made for them.
package kvevents
