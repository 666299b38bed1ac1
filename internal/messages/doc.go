// Package messages is Anthropic's Messages API on top of chat completions: a request becomes a chat
// (Parse, Request.Chat), and a chat's answer becomes a message, whole or as events (Answer). It knows
// no HTTP.
package messages
