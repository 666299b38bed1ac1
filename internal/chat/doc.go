// Package chat is chat completions as other APIs use them: requests that they write
// (Conversation, Request), and answers that they read (Events, Read). internal/responses and
// internal/messages are such APIs.
//
// A text is carried as the body of a JSON string, with its escapes and without its quotes (Text), from
// one JSON to the next: nothing is decoded, and characters stay as they were written.
package chat
